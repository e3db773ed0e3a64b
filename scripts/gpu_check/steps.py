"""Whole steps: a step by part, what was captured or compiled for it, and whether an answer needed more."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from evaluation.inference.entrants import entrant_of
from model.commands.matrix_file import make_drafter
from model.engine.drafter import Drafter
from model.engine.loop import decode
from model.engine.step import PARTS, StepRecord
from model.engine.target import TargetModel
from model.methods import Method
from scripts.gpu_check.bench import EAGER, KINDS, Bench, Found, cell

METHODS = ("vanilla", "recycling", "recycling-auto", "hybrid")
# Tokens of the first text; on the simulated device, where only the code is tried, fewer.
NUM_TOKENS, FEW_TOKENS = 128, 4


def whole_steps(bench: Bench, found: Found) -> None:
    """Time the parts of steps, and hold that no answer captures."""
    rows: list[dict[str, Any]] = []
    methods = METHODS[:2] if bench.is_simulated else METHODS
    for kind, name in bench.in_time([(k, n) for k in KINDS for n in methods], found):
        what = f"{name}, {kind}"
        row = found.attempt(what, partial(_prepared_steps, bench, kind, name))
        if row is None:
            continue
        rows.append({"kind": kind, "method": name, **row})
        if row["late_shapes"]:
            found.problems.append(f"{what}: {row['late_shapes']} calls came first within an answer")
    for kind in {row["kind"] for row in rows} - {EAGER}:
        if type(bench.target(kind)) is TargetModel:
            found.problems.append(f"{kind}: the model cannot be captured; see standard error")
    found.figures["rows"] = rows
    keys = ("graphs", "late_shapes")
    header = ("target", "method", *PARTS, "step", "tokens", *keys, "seconds", "allocated MB")
    body = [
        [
            *(row["kind"], row["method"]),
            *(cell(row[key], 3) for key in (*PARTS, "step", "tokens")),
            *(str(row[key]) for key in keys),
            *(cell(row["seconds"]), cell(row["allocated_bytes"] / 2**20, 1)),
        ]
        for row in rows
    ]
    title = "milliseconds of a step by part, its tokens, and what was prepared for a method beyond those above"
    bench.show(title, header, body)


def _prepared_steps(bench: Bench, kind: str, name: str) -> dict[str, Any]:
    """Decode a text, prepare for a longer one, and measure its steps: the mean of each part, in milliseconds."""
    target = bench.target(kind)
    before, bytes_before = target.shapes.preparation, _allocated(bench)
    entrant = entrant_of(name)
    assert isinstance(entrant.method, Method)
    drafter = make_drafter(entrant.method, entrant.config, target.vocab_size, target.device, {})
    num_tokens = FEW_TOKENS if bench.is_simulated else NUM_TOKENS
    short, long = sorted(bench.prompts(2), key=len)
    _decoded(target, drafter, short, num_tokens)
    # The second text is made longer than any bucket that the first has seen.
    drafter.prepare(target, len(long) + 2 * num_tokens)
    steps = _decoded(target, drafter, long, 2 * num_tokens)[1:]
    spent = {part: sum(getattr(step, f"{part}_ns") for step in steps) / 1e6 for part in PARTS}
    means = {part: time / len(steps) for part, time in spent.items()}
    after = target.shapes.preparation
    return {
        **means,
        "step": sum(means.values()),
        "tokens": sum(len(step.tokens) for step in steps) / len(steps),
        "graphs": after.num_graphs - before.num_graphs,
        "seconds": after.seconds - before.seconds,
        "allocated_bytes": _allocated(bench) - bytes_before,
        "late_shapes": target.shapes.num_late,
    }


def _allocated(bench: Bench) -> int:
    torch.cuda.synchronize(bench.device)
    return torch.cuda.memory_allocated(bench.device)


def _decoded(
    target: TargetModel, drafter: Drafter, prompt: list[int], num_tokens: int
) -> list[StepRecord]:
    return list(decode(target, drafter, prompt, max_new_tokens=num_tokens, eos_ids=()))
