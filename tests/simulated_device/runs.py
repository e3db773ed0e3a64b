"""Every method on every kind of target, run once on a GPU; and the table of what their steps cost.

The table is what steps cost on a simulated GPU. It is written anew, after a change that is meant, by

    python -m tests.simulated_device.runs
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from model.backends.target import TargetModel
from tests.simulated_device.demo import KINDS, SETTINGS, Run, Setting, demo_target, run
from tests.simulated_device.device import SimulatedCuda
from tests.simulated_device.double.accounts import Accounts
from tests.simulated_device.waits import counted_waits

TABLE = Path(__file__).with_name("steps.json")
CASES = [(kind, setting) for kind in KINDS for setting in SETTINGS if setting.runs_on(kind)]


class Runs:
    """Runs on a GPU and on the CPU, each made when it is first asked for.

    Args:
        gpu: simulated ones; None for the real one.
    """

    def __init__(self, gpu: SimulatedCuda | None) -> None:
        self.gpu = gpu
        self.target_on_gpu = cache(self._target_on_gpu)
        self.target_on_cpu = cache(lambda: demo_target("eager", "cpu"))
        self.on_gpu = cache(self._on_gpu)
        self.on_cpu = cache(self._on_cpu)

    def on_device(self) -> AbstractContextManager[object]:
        """Show the GPU to torch within a block."""
        return self.gpu or nullcontext()

    def _target_on_gpu(self, kind: str) -> TargetModel:
        with self.on_device():
            return demo_target(kind, "cuda")

    def _on_gpu(self, kind: str, index: int) -> Run:
        target = self.target_on_gpu(kind)
        with self.on_device(), counted_waits(self.gpu) as accounts:
            return run(target, SETTINGS[index], accounts)

    def _on_cpu(self, index: int) -> Run:
        return run(self.target_on_cpu(), SETTINGS[index], Accounts())


def table() -> dict[str, dict[str, Any]]:
    """Return the stated costs of steps: by kind and setting, launches and kernels at most, and waits by place."""
    found: dict[str, dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Write the table anew."""
    runs, found = Runs(SimulatedCuda()), {kind: dict[str, Any]() for kind in KINDS}
    for kind, setting in CASES:
        costs = runs.on_gpu(kind, SETTINGS.index(setting)).costs
        waits = dict(sorted(costs.waits.items()))
        counts = {"launches": costs.launches, "kernels": costs.kernels}
        found[kind][setting.name] = {**counts, "waits": waits}
    TABLE.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def name_of(case: tuple[str, Setting]) -> str:
    """Return the name of a case."""
    return f"{case[0]}-{case[1].name}"


if __name__ == "__main__":
    main()
