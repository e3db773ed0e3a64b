"""The parts that all blocks of the check share: device, sizes, the model and its targets, the time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

from evaluation.questions.conversation import Conversation, choose_conversation
from evaluation.questions.questions import load_questions, question_file_of
from model.budget.measure import NAME as COSTS
from model.commands.loading import CheckedModel, check_model, load_target, target_of
from model.commands.model_options import ModelOptions
from model.compiled.compiled_graphs import CompiledGraphedTarget
from model.compiled.graphs import graphed
from model.engine.self_test import self_test
from model.engine.support import eos_ids_of
from model.engine.target import TargetModel
from scripts.benchmark.methods import first_prompts
from scripts.enlarge.arithmetic import SHAPES
from scripts.enlarge.command import scaled_model
from scripts.gpu_check.findings import Findings, Result
from scripts.gpu_check.sizes import Sizes
from tests.simulated_device.device import SimulatedCuda
from tests.simulated_device.double.accounts import Accounts
from tests.simulated_device.given_costs import NEARLY_FLAT, GivenCosts
from tests.simulated_device.waits import counted_waits

T = TypeVar("T")
AS_IT_IS = "demo"  # the shape of the demo model itself
EAGER, GRAPHS, COMPILED = "eager", "graphs", "compiled"


@dataclass
class Bench:
    """The device under test, and what is measured on it.

    Attributes:
        options: the model and its device.
        shape: to which the demo model is enlarged.
        sizes: of all that is measured.
        deadline: of the whole check, on the clock of `time.perf_counter`.
        gpu: the simulated device; None on a real one.
        use_compile: whether compiled passes are measured, too.
        results: of the blocks so far, by number.
        device_facts: what is known of the device beside what block 0 finds.
    """

    options: ModelOptions
    shape: str
    sizes: Sizes
    deadline: float
    gpu: SimulatedCuda | None = None
    use_compile: bool = False
    results: dict[int, Result] = field(default_factory=dict)
    device_facts: dict[str, Any] = field(default_factory=dict)
    _targets: dict[str, TargetModel] = field(default_factory=dict)

    @property
    def is_simulated(self) -> bool:
        """Whether times are no measurements."""
        return self.gpu is not None

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.perf_counter()

    @cached_property
    def device(self) -> torch.device:
        """The device, with its index."""
        return torch.empty(0, device=self.options.device).device

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of targets that are measured."""
        return (EAGER, GRAPHS, COMPILED) if self.use_compile else (EAGER, GRAPHS)

    def counted_waits(self) -> AbstractContextManager[Accounts]:
        """Return the block within which waits are counted."""
        return counted_waits(self.gpu)

    def say(self, line: str) -> None:
        """Tell people what is going on."""
        print(line, file=sys.stderr, flush=True)

    @cached_property
    def checked(self) -> CheckedModel:
        """The model's config and tokenizer, its dtype and device."""
        return check_model(self.options)

    @cached_property
    def conversation(self) -> Conversation:
        """The template of the model's prompts."""
        return choose_conversation("auto", self.options.model_path, self.checked.tokenizer)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        model = self.target(EAGER).model
        return eos_ids_of(model, self.checked.tokenizer) | self.conversation.stop_ids

    def prompts(self, count: int, bench_name: str = "demo") -> list[list[int]]:
        """Return the prompts of questions, evenly spread over a benchmark's."""
        questions = load_questions(question_file_of(bench_name), count=count)
        return first_prompts(self.conversation, questions, self.checked)

    def target(self, kind: str) -> TargetModel:
        """Return the model as a target of a kind, self-tested; made at the first call."""
        if kind not in self._targets:
            self._targets[kind] = target = self._made(kind)
            if self.is_simulated:  # measuring takes long, and means nothing
                target.measured[COSTS] = GivenCosts(*NEARLY_FLAT)
        return self._targets[kind]

    def new_target(self, kind: str) -> TargetModel:
        """Return another target over the same weights, without graphs or code of earlier ones."""
        model = self.target(EAGER).model
        use_kernels = self.options.kernels != "off"
        if kind == COMPILED:
            return CompiledGraphedTarget(model, use_kernels, say=self.say)
        return graphed(model, use_kernels, say=self.say)

    def _made(self, kind: str) -> TargetModel:
        if kind == EAGER:
            return self._loaded()
        target = self.new_target(kind)
        self_test(target, say=self.say)
        return target

    def _loaded(self) -> TargetModel:
        eager = replace(self.options, graphs="off")
        if self.shape == AS_IT_IS:
            return load_target(eager, self.checked)
        small = load_target(eager, self.checked._replace(dtype=torch.float32)).model
        large = scaled_model(small, SHAPES[self.shape], self.checked.dtype)
        target = target_of(large, eager)
        self_test(target, say=self.say)
        return target

    def in_time(self, cases: Iterable[T], findings: Findings) -> Iterator[T]:
        """Yield cases while there is time; a note says how many are left out."""
        every = list(cases)
        for index, case in enumerate(every):
            if self.seconds_left <= 0:
                findings.notes.append(f"no time for {len(every) - index} of {len(every)} cases")
                return
            yield case
