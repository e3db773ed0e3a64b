"""Surroundings of all random cases: kernels for tiny models too, and given costs of a step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers

from model.budget.cost_model import CostModel
from model.kernels import attention, linear
from tests.simulated_device.given_costs import NEARLY_FLAT, GivenCosts


def _costs(target: object) -> CostModel:
    return GivenCosts(*NEARLY_FLAT)


@contextmanager
def surroundings(cost_cache: str | None = None) -> Iterator[None]:
    """Within the block tiny models have the kernels and programs of large ones, and drafting always pays."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what cases do on purpose
        for one in (linear, attention):
            patch.setattr(one, "FEWEST_WEIGHTS", 0)
        patch.setattr("model.budget.measure.read_or_measure", _costs)
        if cost_cache is not None:
            patch.setenv("TOKEN_RECYCLING_CACHE", cost_cache)
        yield
