"""Every method on simulated GPUs, run once for all tests."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.simulated_device.device import SimulatedCuda
from tests.simulated_device.runs import Runs

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def runs() -> Runs:
    """All runs, each made when a test first asks for it."""
    return Runs()


@pytest.fixture(scope="session")
def gpu(runs: Runs) -> SimulatedCuda:
    """Two simulated GPUs, not yet shown to torch: `with gpu`."""
    return runs.gpu
