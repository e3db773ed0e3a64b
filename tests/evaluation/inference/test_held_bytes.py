"""What an object holds is counted once, and a comparison records it of each drafter.

Run: pytest tests/evaluation/inference/test_held_bytes.py
"""

from __future__ import annotations

import math
from array import array
from pathlib import Path

import numpy as np
import torch

from evaluation import compare
from evaluation.inference.method import held_bytes
from tests.evaluation.conftest import read_meta, run


class Holder:
    """An object with slots and a dict."""

    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)


def test_all_that_is_held_counts_once() -> None:
    values = np.zeros(100_000, dtype=np.float64)
    shared = torch.from_numpy(values)
    held = held_bytes(
        Holder(a=values, b=values[10:], c=shared, d=shared[5:], e=[values, {1: shared}])
    )
    assert 800_000 <= held < 803_000
    assert held_bytes(Holder(a=torch.zeros(1000), b=torch.zeros(1000))) >= 8000
    assert held_bytes(Holder(a=array("i", range(10_000)))) >= 40_000
    numbers = {(one, one + 1): one + 10**6 for one in range(10_000)}
    # A pair of 8-byte references, a number of 28 bytes and two references in the dict, at the least.
    assert held_bytes(Holder(a=numbers)) > 10_000 * (16 + 28 + 16)
    assert held_bytes(Holder(a=np, b=math.sin, c=Holder)) < 2000
    assert held_bytes(Holder(a=values, b=torch.zeros(1000)), apart_from=Holder(a=shared)) < 6000


def test_a_comparison_and_a_single_run_record_what_each_drafter_holds(
    options: list[str], tmp_path: Path
) -> None:
    folder, single = tmp_path / "out", tmp_path / "single.jsonl"
    methods = ["vanilla", "recycling", "generate"]
    assert compare.main([*options, "--methods", *methods, "--out", str(folder)]) == 0
    found = {
        name: read_meta(next(folder.glob(f"*-{name}-float32*.jsonl"))).get("held_bytes")
        for name in methods
    }
    records = {name: read_meta(next(folder.glob(f"*-{name}-float32*.jsonl"))) for name in methods}
    assert [one.get("keeps_memory") for one in records.values()] == [None, True, None]
    assert run("recycling", options, single) == 0
    matrix = 8192 * 8 * 4  # eight successors of each token, 32 bits each
    assert found["generate"] is None and 0 < found["vanilla"] < matrix
    assert matrix < found["recycling"] < 4 * matrix
    assert abs(read_meta(single)["held_bytes"] / found["recycling"] - 1) < 0.05
