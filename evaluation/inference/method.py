"""A method on a loaded model: how it answers, where memory is short too, and what it holds."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from evaluation.answers.row import Turn
from evaluation.inference.answering import Answerer, Prompt, Result
from evaluation.inference.method_batch import MethodBatch
from evaluation.inference.plan import Plan
from evaluation.inference.turns import token_rule, turn_of
from model.api.prompts import ends_text
from model.budget.cost_model import CostModel
from model.budget.paced import CostAwareDrafter
from model.commands.command_line import user_errors
from model.commands.matrix_file import make_drafter
from model.engine.budget import DraftBudget
from model.engine.drafter import Drafter, VerifiedStep
from model.engine.loop import generate
from model.engine.target import TargetModel
from model.engine.tree import DraftTree
from model.methods import Method

logger = logging.getLogger(__name__)

# Tokens of the longest chain in lean mode: logits and cache rows of a few nodes instead of a whole tree.
LEAN_DEPTH = 4
# What all objects share, and nobody holds.
SHARED = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    ctypes.CDLL,
)


class MethodAnswerer(Answerer):
    """A drafter on a target model, or siblings in a batch; a `UserError` if they do not fit each other."""

    def __init__(self, plan: Plan, target: TargetModel) -> None:
        method, sampling = plan.entrant.method, plan.run.sampling
        assert isinstance(method, Method), "others answer in their own ways"
        self.target = target
        self.drafter = make_drafter(
            method, plan.entrant.config, target.vocab_size, target.device, plan.start_memory
        )
        with user_errors():
            self.drafter.check_target(target)
        self._generator = torch.Generator(device=target.device)
        self._is_warm = False  # answers before that are not measured
        eos_ids, stop = plan.eos_ids(target), ends_text(plan.stop_criterion(), target.device)
        self._options: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "eos_ids": eos_ids,
            "rule": token_rule(sampling, self._generator),
            "stop": stop,
        }
        self.size = plan.run.answers.batch_size
        self._batch: MethodBatch | None = None
        if self.size > 1:
            self._batch = MethodBatch(target, self.drafter, sampling, eos_ids, self.size, stop)

    def ask(self, slot: int, prompt: Prompt) -> None:
        if self._batch is not None and not prompt.is_lean:
            self._batch.ask(slot, prompt)

    def ended(self, under_way: Mapping[int, Prompt]) -> Sequence[tuple[int, Result]]:
        lean = {slot: prompt for slot, prompt in under_way.items() if prompt.is_lean}
        if self._batch is None or lean:
            return super().ended(lean or under_way)
        return self._batch.ended()

    def answer(self, prompt: Prompt) -> Turn:
        drafter, prompt_ids = self.drafter, prompt.token_ids
        if prompt.begins_question and drafter.needs.cold_start:
            drafter.reset()
        if prompt.seed is not None:
            self._generator.manual_seed(prompt.seed)
        if prompt.is_lean:
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
            drafter = LeanDrafter(drafter)
        num_late = self.target.num_late
        start, cpu_start = time.perf_counter(), time.process_time()
        generation = generate(self.target, drafter, prompt_ids, **self._options)
        wall_time, cpu_time = time.perf_counter() - start, time.process_time() - cpu_start
        num_captured = self.target.num_late - num_late
        if self._is_warm and num_captured:
            logger.warning(
                "%d shapes were captured within an answer; its time includes the captures",
                num_captured,
            )
        return turn_of(generation.steps, len(prompt_ids), wall_time, cpu_time)

    def notes(self) -> list[str]:
        """Return lines about this run for the log."""
        chain = f"chain drafts only: {self.target.chain_reason}" if self.target.chain_only else ""
        size = self.target.num_state_bytes / 2**20
        states = f"recurrent states: {size:.2f} MB a text" if size else ""
        return [note for note in (self.drafter.describe(), chain, states) if note]

    def end_warmup(self) -> None:
        """Forget the warm-up, unless the method keeps it, and prepare the model's shapes."""
        if not self.drafter.needs.warmup_memory:
            self.drafter.reset()
        self.drafter.prepare(self.target, 0)
        self._is_warm = True
        if prepared := str(self.target.preparation):
            print(prepared, file=sys.stderr, flush=True)

    def memory(self) -> dict[str, torch.Tensor]:
        return self.drafter.memory() if self.drafter.is_hot else {}


class LeanDrafter(CostAwareDrafter):
    """Another drafter, held to short chains, that is not shown the prompt's logits.

    Answers are the same, since drafts never change them; steps are more. The drafter's memory across
    prompts goes on, and is forgotten where it starts cold.
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter.config, drafter.vocab_size, drafter.device)
        self._drafter = drafter
        # Neither sketches nor the prompt's logits.
        self.needs = replace(
            drafter.needs, sketches=False, prompt_logits=False, reads_rejected=True
        )
        self._cost_aware = drafter if isinstance(drafter, CostAwareDrafter) else None
        self.wants_costs = self._cost_aware is not None and self._cost_aware.wants_costs
        self.max_nodes = min(drafter.max_nodes, 1 + LEAN_DEPTH)

    def sibling(self) -> LeanDrafter:
        return LeanDrafter(self._drafter.sibling())

    def for_target(self, target: TargetModel) -> Drafter:
        if self.needs.hidden_layers or self.needs.probes:
            self._drafter.for_target(target)
        return super().for_target(target)

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._drafter.start(prompt_ids)

    def observe_prompt_hidden(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        self._drafter.observe_prompt_hidden(token_ids, hidden)

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        depth = min(budget.max_depth, LEAN_DEPTH)
        return self._drafter.propose(context, DraftBudget(depth, True, budget.cost_curve))

    def observe(self, step: VerifiedStep) -> None:
        self._drafter.observe(step)

    def skip(self, tokens: Sequence[int]) -> None:
        self._drafter.skip(tokens)

    def reset(self) -> None:
        self._drafter.reset()

    def draft_costs(self) -> CostModel | None:
        return self._cost_aware.draft_costs() if self._cost_aware is not None else None


def held_bytes(root: Any, apart_from: Any = None) -> int:
    """Return the bytes held by an object, without what another one holds as well.

    It is all that can be reached, each thing once.
    Arrays and tensors count with their whole block of memory, Python's objects with what the interpreter says.
    Classes, functions and modules do not count, nor does memory of libraries, which Python cannot see.
    """
    seen: set[int] = set()
    blocks: dict[int, int] = {}  # address of an array's memory -> its bytes: tensors may share it
    _visit(apart_from, seen, blocks)
    outside = sum(blocks.values())
    return _visit(root, seen, blocks) + sum(blocks.values()) - outside


def _visit(root: Any, seen: set[int], blocks: dict[int, int]) -> int:
    """Add all arrays that can be reached to the blocks; return the bytes of everything else."""
    total = 0
    to_visit = [root]
    while to_visit:
        item = to_visit.pop()
        if id(item) in seen or isinstance(item, SHARED):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            blocks[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, np.ndarray):
            owner = _owner(item)
            address = owner.ctypes.data
            blocks[address] = max(owner.nbytes, blocks.get(address, 0))
        else:
            total += sys.getsizeof(item)
            to_visit += gc.get_referents(item)
    return total


def _owner(array: np.ndarray) -> np.ndarray:
    """Return the array whose memory a view shows."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
