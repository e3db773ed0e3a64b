"""A method on a loaded model: how it answers, where memory is short too, and what it holds."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import time
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from evaluation.answers.row import Turn
from evaluation.answers.step_figures import PARTS, NodePlace
from evaluation.inference.answering import Answerer, Failure, Prompt, Result
from evaluation.inference.config import DecodingOptions
from evaluation.inference.plan import Plan
from evaluation.questions.known import known_of
from model.api.expected import Grammar
from model.api.prompts import ends_text
from model.backends.passes.prefix_cache import PrefixCache
from model.backends.proofs.packing import batch_of
from model.backends.target import TargetModel
from model.budget.cost_model import CostModel
from model.budget.paced import CostAwareDrafter, batch_budget
from model.commands.command_line import user_errors
from model.commands.loading import make_drafter
from model.engine.batch import Batch
from model.engine.budget import DraftBudget
from model.engine.drafter import Drafter, VerifiedStep
from model.engine.loop import generate
from model.engine.rules import GreedyRule, Processor, SamplingRule, TokenRule, sampling_processors
from model.engine.sequence import Request
from model.engine.step import StepRecord
from model.engine.tree import DraftTree
from model.methods import Method

logger = logging.getLogger(__name__)

# Tokens of the longest chain in low-memory mode: logits and cache rows of a few nodes instead of a whole tree.
LOW_MEMORY_DEPTH = 4
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
    """A drafter on a target model; a `UserError` if they do not fit each other."""

    def __init__(self, plan: Plan, target: TargetModel) -> None:
        method, sampling = plan.participant.method, plan.run.sampling
        assert isinstance(method, Method), "others answer in their own ways"
        self.target = target
        self.drafter = make_drafter(
            method, plan.participant.config, target.vocab_size, target.device, plan.start_memory
        )
        with user_errors():
            self.drafter.check_target(target)
        self._generator = torch.Generator(device=target.device)
        self._rule, self._sampling = rule_of(sampling, self._generator), sampling
        self._tokenizer = plan.model.tokenizer
        self._prefix_cache = PrefixCache() if plan.run.answers.prefix_cache else None
        self._is_warm = False  # answers before that are not measured
        self._options: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "eos_ids": plan.eos_ids(target),
            "stop": ends_text(plan.stop_criterion(), target.device),
        }

    def answer(self, prompt: Prompt) -> Turn:
        drafter, prompt_ids = self.drafter, prompt.token_ids
        if prompt.begins_question and drafter.needs.cold_start:
            drafter.reset()
        if prompt.seed is not None:
            self._generator.manual_seed(prompt.seed)
        if prompt.is_low_memory:
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
            drafter = LowMemoryDrafter(drafter)
        rule, guesses = self._chosen(prompt, self._rule, self._generator)
        num_late = self.target.num_late
        start, cpu_start = time.perf_counter(), time.process_time()
        generation = generate(
            self.target,
            drafter,
            prompt_ids,
            prefix_cache=self._prefix_cache,
            rule=rule,
            guesses=guesses,
            **self._options,
        )
        wall_time, cpu_time = time.perf_counter() - start, time.process_time() - cpu_start
        num_captured = self.target.num_late - num_late
        if self._is_warm and num_captured:
            logger.warning(
                "%d shapes were captured within an answer; its time includes the captures",
                num_captured,
            )
        turn = turn_of(generation.steps, len(prompt_ids), wall_time, cpu_time)
        if self._prefix_cache is not None:
            turn.details["cached_tokens"] = generation.steps[0].num_cached
        return turn

    def _chosen(
        self, prompt: Prompt, rule: TokenRule | None, generator: torch.Generator
    ) -> tuple[TokenRule | None, Any]:
        """Return how the tokens of an answer are chosen, and what is guessed of it; `rule` is that of free ones."""
        question = prompt.question
        if not question.fields and not question.predictions:
            return rule, None
        size, ends = self.target.vocab_size, self._options["eos_ids"]
        known = known_of(question, prompt.turn, prompt.token_ids, self._tokenizer, size, ends)
        if known.grammar is not None:
            rule = rule_of(self._sampling, generator, known.grammar)
        return rule, known.guesses

    def notes(self) -> list[str]:
        """Return lines about this run for the log."""
        chain = f"chain drafts only: {self.target.chain_reason}" if self.target.chain_only else ""
        size = self.target.num_state_bytes / 2**20
        states = f"recurrent states: {size:.2f} MiB a text" if size else ""
        return [note for note in (self.drafter.describe(), chain, states) if note]

    def end_warmup(self) -> None:
        """Forget the warm-up, unless the method keeps it, and prepare the model's shapes."""
        if not self.drafter.needs.warmup_memory:
            self.drafter.reset()
        self.drafter.prepare(self.target, 0)
        if self._prefix_cache is not None:
            self._prefix_cache = PrefixCache()
        self._is_warm = True
        if prepared := str(self.target.preparation):
            print(prepared, file=sys.stderr, flush=True)

    def memory(self) -> dict[str, torch.Tensor]:
        return self.drafter.memory() if self.drafter.is_hot else {}


@dataclass(slots=True)
class _UnderWay:
    """A turn under way."""

    num_prompt: int
    start: float  # on the batch's clock
    cpu_time: float = 0.0


class BatchedMethod(MethodAnswerer):
    """A method whose texts share passes: siblings of its drafter draft for them, and learn together.

    Its clock stands while nothing is decoded, so that what a user waits for is the texts of the batch alone.
    """

    def __init__(self, plan: Plan, target: TargetModel) -> None:
        super().__init__(plan, target)
        self.size = plan.run.answers.batch_size
        self._generators = [torch.Generator(device=target.device) for _ in range(self.size)]
        self._rules = [rule_of(plan.run.sampling, one) for one in self._generators]
        self._turns: dict[int, _UnderWay] = {}
        self._clock = 0.0

    # Made at the first turn, since costs are measured then: by that time the run has chosen its number of threads.
    @cached_property
    def _batch(self) -> Batch:
        budget = batch_budget(self.drafter, self.target)
        return batch_of(self.target, self.drafter, self.size, budget)

    def ask(self, slot: int, prompt: Prompt) -> None:
        if prompt.is_low_memory:
            return  # it is answered alone
        if prompt.seed is not None:
            self._generators[slot].manual_seed(prompt.seed)
        rule, guesses = self._chosen(prompt, self._rules[slot], self._generators[slot])
        request = Request(prompt.token_ids, rule=rule, guesses=guesses, **self._options)
        self._batch.add(slot, request)
        self._turns[slot] = _UnderWay(len(prompt.token_ids), self._clock)

    def ended(self, under_way: Mapping[int, Prompt]) -> Sequence[tuple[int, Result]]:
        if low_memory := {
            slot: prompt for slot, prompt in under_way.items() if prompt.is_low_memory
        }:
            return super().ended(low_memory)
        found: list[tuple[int, Result]] = []
        while not found:
            try:
                found = self._step()
            except Exception as error:  # of the pass that all share
                found = [(slot, Failure.of(error)) for slot in self._turns]
                for slot in self._turns:
                    self._batch.remove(slot)
        for slot, _ in found:
            del self._turns[slot]
        return found

    def _step(self) -> list[tuple[int, Result]]:
        """Decode a step of every turn; return those that ended, by slot."""
        start, cpu_start = time.perf_counter(), time.process_time()
        events = self._batch.step()
        self._clock += time.perf_counter() - start
        cpu_share = (time.process_time() - cpu_start) / len(self._turns)
        for turn in self._turns.values():
            turn.cpu_time += cpu_share
        found: list[tuple[int, Result]] = []
        for event in events:
            turn, steps = self._turns[event.key], event.steps
            if event.error is not None:
                found.append((event.key, Failure.of(event.error)))
            elif event.is_last:
                share_time = sum(step.share_ns for step in steps) / 1e9
                waited = self._clock - turn.start
                answer = turn_of(steps, turn.num_prompt, waited, turn.cpu_time, share_time)
                found.append((event.key, answer))
        return found


def rule_of(
    sampling: DecodingOptions, generator: torch.Generator, grammar: Grammar | None = None
) -> TokenRule | None:
    """Return how each token is chosen; None: it is the likeliest."""
    processors: list[Processor] = [] if grammar is None else [grammar]
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if not sampling.temperature:
        return GreedyRule(processors) if processors else None
    processors += sampling_processors(
        sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    )
    return SamplingRule(processors, generator)


def turn_of(
    steps: Sequence[StepRecord],
    num_prompt: int,
    wall_time: float,
    cpu_time: float,
    share_time: float | None = None,
) -> Turn:
    """Return the answer that these steps make.

    Args:
        steps: of one turn, all of them.
        num_prompt: tokens of its prompt.
        wall_time: seconds that a user waited.
        cpu_time: CPU seconds of the process.
        share_time: seconds spent on this turn; None: all that a user waited.
    """
    prefill_time = sum(step.prefill_ns for step in steps) / 1e9
    details = {
        "prompt_tokens": num_prompt,
        "prefill_time": prefill_time,
        "decode_time": (wall_time if share_time is None else share_time) - prefill_time,
        "cpu_time": cpu_time,
        "stop_reasons": steps[-1].stop_reason,
        **step_counts(steps),
    }
    if share_time is not None:
        details["share_time"] = share_time
    token_ids = [token for step in steps for token in step.tokens]
    return Turn(token_ids, [len(step.tokens) for step in steps], wall_time, details)


def step_counts(steps: Sequence[StepRecord]) -> dict[str, Any]:
    """Return the counts of one turn's steps, all JSON-able.

    Returns:
        `draft_tokens`: nodes drafted, roots excluded. `drafted`: the same by place,
        `drafted[depth - 1][rank]`. `accepted`, of the same shape: those whose tokens were
        emitted. `sources`: drafted and accepted by the name of their source, empty where the
        drafter names none. `step_nodes`: nodes that each step drafted, 0 without a draft. `step_times`: seconds by
        part, of which each text of a batch has a share.
    """
    drafted: Counter[NodePlace] = Counter()
    accepted: Counter[NodePlace] = Counter()
    sources: dict[str, list[int]] = {}
    for topology, count in Counter(step.tree.topology for step in steps).items():
        places = zip(topology.depths[1:], topology.ranks[1:], strict=True)
        drafted.update({place: count * number for place, number in Counter(places).items()})
    for step in steps:
        nodes, topology = step.accepted_nodes, step.tree.topology
        accepted.update((topology.depths[node], topology.ranks[node]) for node in nodes)
        names = step.tree.sources or ()
        for name in names[1:]:
            sources.setdefault(name, [0, 0])[0] += 1
        for node in nodes if names else ():
            sources[names[node]][1] += 1
    return {
        "draft_tokens": drafted.total(),
        "drafted": _by_place(drafted, drafted),
        "accepted": _by_place(accepted, drafted),
        "sources": sources,
        "step_nodes": [step.num_nodes - 1 for step in steps],
        "step_times": {
            part: sum(getattr(step, f"{part}_ns") / step.num_sequences for step in steps) / 1e9
            for part in PARTS
        },
    }


def _by_place(counts: Counter[NodePlace], shape: Counter[NodePlace]) -> list[list[int]]:
    """Lay counts out as [depth - 1][rank], as far as `shape` reaches."""
    widths: dict[int, int] = {}
    for depth, rank in shape:
        widths[depth] = max(widths.get(depth, 0), rank + 1)
    return [[counts[depth, rank] for rank in range(widths[depth])] for depth in sorted(widths)]


class LowMemoryDrafter(CostAwareDrafter):
    """Another drafter, held to short chains, that is not shown the prompt's logits.

    Answers are the same, since drafts never change them; steps are more. The drafter's memory across
    prompts goes on, and is forgotten where it starts cold.
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter.config, drafter.vocab_size, drafter.device)
        self._drafter = drafter
        # Neither logit samples nor the prompt's logits.
        self.needs = replace(
            drafter.needs, logit_samples=False, prompt_logits=False, reads_rejected=True
        )
        self._cost_aware = drafter if isinstance(drafter, CostAwareDrafter) else None
        self.wants_costs = self._cost_aware is not None and self._cost_aware.wants_costs
        self.max_nodes = min(drafter.max_nodes, 1 + LOW_MEMORY_DEPTH)

    def sibling(self) -> LowMemoryDrafter:
        return LowMemoryDrafter(self._drafter.sibling())

    def for_target(self, target: TargetModel) -> Drafter:
        if self.needs.hidden_layers or self.needs.probes:
            self._drafter.for_target(target)
        return super().for_target(target)

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._drafter.start(prompt_ids)

    def observe_prompt_hidden(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        self._drafter.observe_prompt_hidden(token_ids, hidden)

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        depth = min(budget.max_depth, LOW_MEMORY_DEPTH)
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
            owner = item  # the array whose memory a view shows
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            address = owner.ctypes.data
            blocks[address] = max(owner.nbytes, blocks.get(address, 0))
        else:
            total += sys.getsizeof(item)
            to_visit += gc.get_referents(item)
    return total
