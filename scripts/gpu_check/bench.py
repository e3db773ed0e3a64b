"""What all parts of the check share: the model as targets, clocks, and what a part found."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

from evaluation.inference.command import participant_of
from evaluation.questions.conversation import Conversation, choose_conversation
from evaluation.questions.questions import load_questions, question_file_of
from evaluation.reporting.tables import markdown_table
from model.backends.graphs.graphed_target import GraphedTarget
from model.backends.proofs.self_test import self_test
from model.backends.target import TargetModel
from model.budget.cost_model import CostModel
from model.budget.measure import NAME as COSTS
from model.commands.command_line import first_line
from model.commands.loading import CheckedModel, check_model, load_target, make_drafter, target_of
from model.commands.model_options import ModelOptions
from model.engine.drafter import Drafter
from model.methods import Method
from scripts.enlarge import SHAPES, scaled_model

T = TypeVar("T")
ORIGINAL_SHAPE = "demo"  # the shape of the demo model itself
# The stock model's kernels one by one, the same as graphs, and fused passes as graphs.
EAGER, GRAPHS, FUSED = KINDS = "eager", "graphs", "fused"
PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"
NO_MEASUREMENT = "simulated device: times and speeds are not a measurement"


@dataclass
class Found:
    """The outcome of a part of the check; notes and problems are a line each."""

    status: str = PASSED  # or FAILED or SKIPPED
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)  # for the JSON report and the verdicts
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # with any, the part has failed

    def attempt(self, what: str, call: Callable[[], T]) -> T | None:
        """Return the result of one measurement of several; an error is a problem, and the others go on."""
        try:
            return call()
        except Exception as error:  # on an unknown device anything may be raised
            self.problems.append(f"{what}: {one_line(error)}")
            return None


@dataclass
class Bench:
    """The device under test."""

    options: ModelOptions  # the model and its device
    shape: str  # to which the demo model is enlarged
    deadline: float  # of the whole check, on the clock of `time.perf_counter`
    # Makes the costs of a step where measuring them means nothing, on a simulated device.
    given_costs: Callable[[], CostModel] | None = None
    _targets: dict[str, TargetModel] = field(default_factory=dict)

    @property
    def is_simulated(self) -> bool:
        """Whether times are no measurements."""
        return self.given_costs is not None

    def sized(self, real: T, few: T) -> T:
        """Return what is measured, or the few on which a simulated device tries the code."""
        return few if self.is_simulated else real

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.perf_counter()

    @cached_property
    def device(self) -> torch.device:
        """The device, with its index."""
        return torch.empty(0, device=self.options.device).device

    @cached_property
    def checked(self) -> CheckedModel:
        return check_model(self.options)

    @cached_property
    def conversation(self) -> Conversation:
        return choose_conversation("auto", self.options.model_path, self.checked.tokenizer)

    def prompts(self, count: int) -> list[list[int]]:
        """Return the prompts of questions, evenly spread over the demo's."""
        questions = load_questions(question_file_of("demo"), count=count)
        return [self.conversation.prompt_ids([], question.turns[0]) for question in questions]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of target: Triton's kernels do not run on a simulated device."""
        return self.sized(KINDS, (EAGER, GRAPHS))

    def options_of(self, kind: str) -> ModelOptions:
        kernels = "off" if kind == GRAPHS else self.options.kernels
        return replace(self.options, graphs="off" if kind == EAGER else "auto", kernels=kernels)

    def target(self, kind: str) -> TargetModel:
        """Return the model as a target of a kind, self-tested; made at the first call.

        Raises:
            RuntimeError: the model cannot be captured as graphs.
        """
        if kind not in self._targets:
            target = target_of(self._model, self.options_of(kind))
            if kind != EAGER:
                if not isinstance(target, GraphedTarget):
                    raise RuntimeError("the model cannot be captured; see standard error")
                if kind == FUSED and target.fused is None:
                    raise RuntimeError(f"passes are not fused: {target.why_not_fused}")
            self_test(target, say=say)
            if self.given_costs:
                target.measured[COSTS] = self.given_costs()
            self._targets[kind] = target
        return self._targets[kind]

    @cached_property
    def _model(self) -> Any:
        eager = self.options_of(EAGER)
        if self.shape == ORIGINAL_SHAPE:
            return load_target(eager, self.checked).model
        small = load_target(eager, self.checked._replace(dtype=torch.float32)).model
        return scaled_model(small, SHAPES[self.shape], self.checked.dtype)

    def in_time(self, cases: Iterable[T], found: Found) -> Iterator[T]:
        """Yield cases while there is time; a note says how many are left out."""
        every = list(cases)
        for index, case in enumerate(every):
            if self.seconds_left <= 0:
                found.notes.append(f"no time for {len(every) - index} of {len(every)} cases")
                return
            yield case

    def show(self, title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table of texts and figures; the first two columns name things."""
        body = [
            [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row]
            for row in rows
        ]
        self.show_text(title, markdown_table(header, body, 2))

    def show_text(self, title: str, text: str) -> None:
        mark = f" ({NO_MEASUREMENT})" if self.is_simulated else ""
        print(f"\n{title}{mark}\n\n{text}", flush=True)


def drafter_of(words: str, target: TargetModel) -> Drafter:
    """Return a method's drafter with an empty memory; plain decoding's for transformers' own ways to decode."""
    participant = participant_of("vanilla" if words.startswith("generate") else words)
    assert isinstance(participant.method, Method)
    return make_drafter(
        participant.method, participant.config, target.vocab_size, target.device, {}
    )


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def one_line(error: BaseException) -> str:
    """Return an error in one line, with its type."""
    return f"{type(error).__name__}: {first_line(error)}"
