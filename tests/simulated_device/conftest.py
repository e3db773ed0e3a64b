"""The devices of the laws: simulated GPUs, and the real one where there is one.

`pytest -m gpu` runs the laws on the real GPU, and without one on a simulated one; the usual suite runs both.
"""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.simulated_device.device import SimulatedCuda
from tests.simulated_device.runs import Runs

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

HAS_GPU = torch.cuda.is_available()
SIMULATED, REAL = "simulated", "real"
DEVICES = [
    pytest.param(SIMULATED, marks=() if HAS_GPU else pytest.mark.gpu),
    *([pytest.param(REAL, marks=pytest.mark.gpu)] if HAS_GPU else []),
]


@pytest.fixture(scope="session")
def runs() -> Runs:
    """All runs on simulated GPUs, each made when a test first asks for it."""
    return Runs(SimulatedCuda())


@pytest.fixture(scope="session")
def gpu(runs: Runs) -> SimulatedCuda:
    """Two simulated GPUs, not yet shown to torch: `with gpu`."""
    assert runs.gpu is not None
    return runs.gpu


@pytest.fixture(scope="session")
def real_runs() -> Runs:
    """All runs on the real GPU."""
    return Runs(None)


@pytest.fixture(scope="session", params=DEVICES)
def device_runs(request: pytest.FixtureRequest) -> Runs:
    """All runs on a device of the laws."""
    name = "runs" if request.param == SIMULATED else "real_runs"
    found: Runs = request.getfixturevalue(name)
    return found
