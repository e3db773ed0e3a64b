"""Simulated GPUs, and the demo model on them and on the CPU, loaded once."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
import transformers

from model.engine.target import TargetModel
from scripts.gpu_check.simulated.device import SimulatedCuda
from tests.simulated_device.demo import demo_target

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

Targets = Callable[[str], TargetModel]


@pytest.fixture(scope="session")
def gpu() -> SimulatedCuda:
    """Two simulated GPUs, not yet shown to torch: `with gpu`."""
    return SimulatedCuda()


@pytest.fixture(scope="session")
def on_gpu(gpu: SimulatedCuda) -> Targets:
    """The demo model on the first GPU, by kind of target."""

    @lru_cache
    def target(kind: str) -> TargetModel:
        with gpu:
            return demo_target(kind, "cuda")

    return target


@pytest.fixture(scope="session")
def on_cpu() -> TargetModel:
    """The demo model on the CPU."""
    return demo_target("eager", "cpu")
