"""Cost curves: what a step takes on a machine, by nodes, length of the text and sequences, in a file of its own.

`evaluation.record --costs` measures one, and `evaluation.replay --costs` predicts times by it. A pass over nodes
after cached tokens takes the measured milliseconds, linear between measured sizes and between the two lengths;
what a step takes beside its pass is measured by plain decoding.

Shapes: S sizes of a pass.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evaluation.answers.record import git_commit
from model.backends.target import TargetModel
from model.budget.cost_model import CONTEXTS, CostModel
from model.budget.measure import MAX_MEASURED_NODES, contexts_of, draft_of, time_pass
from model.budget.paced import sequence_costs
from model.commands.command_line import UserError, first_line
from model.commands.files import parse_json, read_text, write_whole
from model.engine.loop import generate
from model.engine.read_out import likeliest
from model.machine.hardware import device_name, machine_name
from model.machine.timing import progress, relative_spread, seconds_of
from model.methods.vanilla.drafter import VanillaConfig, VanillaDrafter

FORMAT = "step-costs-1"
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 81, 96, 128)
PROMPTS = (16, 128, 512, 1024)
ROUNDS = 9
# Tokens of plain decoding that show what a step takes beside its pass.
DECODED = 48
MAX_BYTES = 2**20
# Likeliest tokens that methods learn from after each token of a prompt.
NUM_LEARNED = 8


@dataclass(frozen=True, slots=True)
class StepCosts:
    """A measured cost curve."""

    name: str  # of the file, in tables
    about: dict[str, Any]  # model, dtype, device, machine, threads, commit
    contexts: tuple[int, int]  # cached tokens of the two curves
    sizes: tuple[int, ...]  # nodes of a pass, root included, rising from 1
    near: tuple[float, ...]  # milliseconds of a pass after the fewer cached tokens [S]
    far: tuple[float, ...]  # after the more
    prompts: dict[str, float]  # milliseconds to read so many tokens
    beside_pass: float  # milliseconds of a step of plain decoding beside its pass
    # Milliseconds that a further sequence adds to a pass, near and far.
    sequence: tuple[float, float] | None
    spread: float  # relative interquartile range of a pass's timings
    # As `prompts`, with the logits of all tokens and the likeliest of these; empty: not measured.
    prompts_with_logits: dict[str, float] = field(default_factory=dict)
    format: str = FORMAT

    @classmethod
    def read(cls, file: Path) -> StepCosts:
        """Read a file; a `UserError` if it is none."""
        values = parse_json(read_text(file, "costs", MAX_BYTES), f"costs {file}")
        try:
            found = cls(**{"name": file.stem, **values})
            if found.format != FORMAT or not len(found.sizes) == len(found.near) == len(found.far):
                raise ValueError(f"is not of format {FORMAT}, or its curves differ in length")
            found.of_pass(1, 1), found.of_prompt(1)
        except (ValueError, TypeError, IndexError) as error:
            raise UserError(
                f"costs {file}: {first_line(error)}; allowed: a file of evaluation.record --costs"
            ) from error
        return found

    def write(self, file: Path) -> None:
        write_whole(file, json.dumps(asdict(self), indent=2) + "\n")

    def of_pass(self, num_nodes: int, context: int) -> float:
        """Return the milliseconds of a pass after so many cached tokens."""
        near, far = (
            np.interp(num_nodes, self.sizes, curve) * max(1.0, num_nodes / self.sizes[-1])
            for curve in (self.near, self.far)
        )
        begin, end = self.contexts
        return float(max(near / 2, near + (context - begin) / (end - begin) * (far - near)))

    def of_prompt(self, num_tokens: int, with_logits: bool = False) -> float:
        """Return the milliseconds to read a prompt, which grow beyond the longest measured one as before it."""
        measured = self.prompts_with_logits if with_logits else {}
        measured = measured or self.prompts
        lengths, times = [0.0, *map(float, measured)], [0.0, *measured.values()]
        beyond = max(0.0, num_tokens - lengths[-1])
        slope = (times[-1] - times[-2]) / (lengths[-1] - lengths[-2])
        return float(np.interp(num_tokens, lengths, times) + beyond * slope)

    def model(self) -> CostModel:
        """Return the costs by which an automatic budget chooses, with nothing learned."""
        sizes = tuple(size for size in self.sizes if size <= MAX_MEASURED_NODES)
        near, far = (tuple(self.of_pass(size, context) for size in sizes) for context in CONTEXTS)
        return CostModel(sizes, near, far)


@torch.inference_mode()
def measure(target: TargetModel, name: str, model_path: str) -> StepCosts:
    """Measure the costs of a loaded model on this machine, in rounds over all sizes, of which the medians count."""
    contexts, longest = contexts_of(target), target.context_limit() or sys.maxsize
    room = longest - contexts[1]
    sizes = [size for size in SIZES if size <= room and target.padded_size(size) == size]
    target.pages.finish()
    target.warm_up(contexts[1], sizes)
    cache = target.new_cache(contexts[1] + SIZES[-1])
    trees = {size: draft_of(target, size) for size in sizes}
    prompts = [length for length in PROMPTS if length < longest]
    passes: dict[tuple[int, int], list[float]] = {}
    reads: dict[tuple[int, bool], list[float]] = {}
    beside: list[float] = []
    vanilla = VanillaDrafter(VanillaConfig(), target.vocab_size, target.device)
    for _ in progress(range(ROUNDS), unit="round"):
        for size, tree in trees.items():
            for context in contexts:
                # Steps of a size come in a row; the first one finds another's data in the processor's caches.
                _, *found = (time_pass(target, cache, tree, context) for _ in range(3))
                passes.setdefault((size, context), []).extend(found)
        for length, with_logits in product(prompts, (False, True)):
            seconds = _seconds_to_read(target, length, with_logits)
            reads.setdefault((length, with_logits), []).append(seconds * 1e3)
        steps = generate(target, vanilla, [1] * contexts[0], max_new_tokens=DECODED).steps
        own = [step.step_ns - step.forward_ns - step.verify_ns for step in steps]
        beside.append(statistics.median(own) / 1e6)
    medians = {point: statistics.median(times) for point, times in passes.items()}
    near, far = (tuple(medians[size, context] for size in sizes) for context in contexts)
    plain, learned = (
        {str(length): statistics.median(reads[length, with_logits]) for length in prompts}
        for with_logits in (False, True)
    )
    return StepCosts(
        name,
        {
            "model_path": model_path,
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": device_name(target.device),
            "machine": machine_name(),
            "threads": torch.get_num_threads(),
            "git_commit": git_commit(),
        },
        (contexts[0], contexts[1]),
        tuple(sizes),
        near,
        far,
        plain,
        statistics.median(beside),
        None if target.mixers else sequence_costs(target),
        statistics.median(relative_spread(times) for times in passes.values()),
        learned,
    )


def _seconds_to_read(target: TargetModel, length: int, with_logits: bool) -> float:
    cache = target.new_cache(length + 1)

    def read() -> None:
        for chunk in target.prefill([1] * (length + 1), cache, with_logits):
            if chunk.logits is not None:
                likeliest(chunk.logits, NUM_LEARNED)

    return seconds_of(read, target.synchronize)
