"""The laws of a device: `pytest -m gpu`, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from scripts.gpu_check.bench import Bench, Found

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/simulated_device"
# On the simulated device, where the usual tests hold all.
FEW = "test_rows_move"
COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


def laws(bench: Bench, found: Found) -> None:
    """Run the tests of the device's laws; each that fails is a problem.

    Raises:
        RuntimeError: if they did not run.
    """
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", TESTS]
    environment = dict(os.environ)
    if bench.is_simulated:
        words += ["-k", FEW]
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=None if bench.is_simulated else bench.seconds_left,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    counts = {name: int(count) for count, name in COUNTS.findall(lines[-1] if lines else "")}
    if done.returncode not in (0, 1) or not counts.get("passed"):
        said = (done.stderr.strip() or "\n".join(lines)).splitlines() or ["nothing"]
        raise RuntimeError(
            f"{TESTS}: pytest ended with code {done.returncode} and said: {said[-1]}; it needs a checkout, and "
            "pip install -r requirements-test.txt"
        )
    found.problems += [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    found.figures |= {"counts": counts, "closing": lines[-1], "passed": done.returncode == 0}
    print(f"\npytest -m gpu: {lines[-1]}", flush=True)
