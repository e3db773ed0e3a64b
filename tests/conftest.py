"""Fixtures of all tests.

Costs of a step are measured on the device in a real run. Here they are given, so that no test
depends on the clock, and measured ones go to a temporary folder. Random numbers are the same at every run.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from model.budget.cost_model import CostModel
from tests.simulated_device.given_costs import NEARLY_FLAT, GivenCosts


@pytest.fixture(autouse=True, scope="session")
def cost_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep measured costs, those of other processes included, out of the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path_factory.mktemp("costs")))
        yield


@pytest.fixture(autouse=True, scope="session")
def no_unusable_gpu() -> Iterator[None]:
    """Run on the CPU, in other processes too, beside a GPU that torch cannot use: commands refuse it."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Begin every test with the same random numbers, whichever ran before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def given_costs() -> Iterator[None]:
    """Give every target model the same costs: nearly flat, as on a GPU, so that drafters with an
    automatic budget draft large trees. Other fixtures decode, too.
    """

    def costs(target: object) -> CostModel:
        return GivenCosts(*NEARLY_FLAT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model.budget.measure.read_or_measure", costs)
        yield
