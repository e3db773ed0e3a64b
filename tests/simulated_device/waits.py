"""Waits of the host for the device, counted: by the simulated device's accounts, on a GPU by torch's warnings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.simulated_device.device import SimulatedCuda
from tests.simulated_device.double.accounts import COPIERS, ROOT, Accounts, place

# Torch's warning in its debug mode of synchronisation; another one says that the mode is a prototype.
WARNING = "called a synchronizing"
OURS = Path(__file__).resolve().relative_to(ROOT).as_posix()


@contextmanager
def counted_waits(gpu: SimulatedCuda | None) -> Iterator[Accounts]:
    """Yield accounts that count waits within the block; on a real GPU (None) they count no launches."""
    if gpu is not None:
        gpu.accounts.clear()
        yield gpu.accounts
        return
    accounts = Accounts()

    def note(message: object, *_: object, **__: object) -> None:
        if WARNING in str(message):
            accounts.waits["wait", place(COPIERS | {OURS}).name] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield accounts
        finally:
            torch.cuda.set_sync_debug_mode("default")
