"""A batch: sequences that share passes of the target model, each exactly as if it were alone.

Every step proposes a draft for each sequence, verifies all drafts in one pass, in the layout of the device
(`SharedPasses`), and concludes each sequence by itself. A sequence that ends leaves at once, so that another may
take its place. Prompts are read between the passes, as many tokens a step that the other sequences wait no longer
than for one chunk. Sequences of a model that cannot share a pass (`model.backends.proofs.packing`) are decoded in
turn, each by the step of the single loop (`model.engine.loop`): the same answers, and no gain.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from ..options import integer
from .backend import PREFILL_CHUNK, Backend, PrefixRows
from .drafter import Drafter
from .loop import step_of
from .read_out import ReadOut
from .sequence import Request, RunningSequence, rows_for
from .step import StepRecord, StepTimer
from .tree import DraftTree

Result = TypeVar("Result")


class Event(NamedTuple):
    """The result of a step for a sequence: its record, or an error."""

    key: Any  # names the sequence, as given to `Batch.add`
    # With a `stop_reason` the sequence has ended and left the batch.
    record: StepRecord | None = None
    # Of its drafter, rule or criterion; the sequence has left the batch.
    error: Exception | None = None
    steps: Sequence[StepRecord] = ()  # all of its steps so far

    @property
    def is_last(self) -> bool:
        """Whether the sequence has ended."""
        return self.record is None or self.record.stop_reason is not None


class Permit:
    """When a batch may decode: always. Sequences of a decoder wait for each other (`model.api.permits`)."""

    def step(self) -> AbstractContextManager[None]:
        """Return a block in which sequences are begun, removed, or decoded by a step."""
        return nullcontext()

    def user_code(self) -> AbstractContextManager[None]:
        """Return a block in which code of the user runs between steps."""
        return nullcontext()

    def end(self) -> None:
        """Let others decode: no sequence is under way, or none goes on."""


class SharedPass(NamedTuple):
    """The outcome of a pass over the trees of several sequences."""

    # After every node of each sequence, [N, V] each; valid until the next pass.
    logits: Sequence[torch.Tensor]
    # Copies what is read of all sequences to the host in one transfer; takes the number of candidates, and whether
    # logit samples are wanted.
    read: Callable[[int, bool], list[ReadOut]]


class SharedPasses(Protocol):
    """Passes of one batch, over the caches that it got here."""

    def new_cache(self, capacity: int, first: Any = None) -> Any:
        """Return a cache for a sequence of up to `capacity` rows; `first`, not used elsewhere, holds its first ones
        and has room for all.
        """

    def release(self, cache: Any) -> None:
        """Take back the cache of a sequence that has left."""

    def is_plain(self, num_sequences: int) -> bool:
        """Whether passes of this many sequences are those of the loop of one sequence, bit for bit."""

    def forward(self, trees: Sequence[DraftTree], caches: Sequence[Any]) -> SharedPass:
        """Append the nodes of each sequence's tree to its cache, in one pass; its hidden states, if they are
        captured (`passes.hidden`), are those of all nodes, sequence after sequence.
        """


class _Place:
    """A sequence's place in the batch; `reading` is None once its prompt is read."""

    def __init__(self, sequence: RunningSequence, own: Drafter) -> None:
        self.sequence = sequence
        self.own = own  # its drafter, as it was made
        self.reading: Iterator[int] | None = sequence.read_prompt()
        self.prefill_ns = 0
        self.steps: list[StepRecord] = []


class Batch:
    """Up to `size` sequences under way.

    Args:
        target: the model.
        drafter: each sequence gets one like it.
        size: most sequences.
        passes: of all sequences; None: each sequence has its own.
        budget: a `BatchBudget` (`model.budget.paced`), which divides the drafted nodes of a step among sequences
            that share passes; None: each drafter proposes for itself.
        shares_memory: whether the sequences learn into the drafter's memory, and from each other; else each begins
            with a copy of it, and what it learns goes with it. Of a method with a cold start each begins with none.
        permit: when the sequences may decode, all together.
        prefix_cache: as of `steps_of`, where sequences have rows of their own.

    Raises:
        ValueError: if the size is not allowed.
    """

    def __init__(
        self,
        target: Backend,
        drafter: Drafter,
        size: int,
        passes: SharedPasses | None,
        budget: Any = None,
        shares_memory: bool = True,
        permit: Permit | None = None,
        prefix_cache: PrefixRows | None = None,
    ) -> None:
        self.target = target
        self.size = integer("batch_size", size, least=1)
        self._drafter, self.permit = drafter, permit or Permit()
        # A drafter without memory may hold weights, which siblings share.
        has_memory = drafter.keeps_memory()
        self._shares_memory = not has_memory or (shares_memory and not drafter.needs.cold_start)
        self._free: list[Drafter] = []  # of sequences that have ended
        self._places: dict[Any, _Place] = {}
        self._passes = passes
        reads_whole = drafter.needs.hidden_layers or drafter.needs.cold_start
        self._prefix_cache = None if reads_whole else prefix_cache
        self._budget = budget if passes is not None else None

    def __len__(self) -> int:
        return len(self._places)

    @property
    def has_capacity(self) -> bool:
        """Whether another sequence may be added."""
        return len(self) < self.size

    @torch.inference_mode()
    def add(self, key: Any, request: Request) -> None:
        """Add a sequence under a free key; its prompt is read in the steps to come.

        Tokens past the limit, which a published code decodes unseen, are left out.

        Raises:
            ValueError: as `Request.checked`.
            RuntimeError: if another sequence has the permit.
        """
        assert self.has_capacity and key not in self._places
        with self._in_permit():
            request, own = request.checked(self.target), self._next_drafter()
            drafter = own.for_target(self.target)
            if self._budget is not None:  # nodes are chosen among those of all sequences
                drafter = own
            cache, rows = None, rows_for(request, drafter)
            if self._prefix_cache is not None:
                cache = self._prefix_cache.open(self.target, request.prompt_ids, rows)
            if self._passes is not None:
                cache = self._passes.new_cache(rows, cache)
            self._places[key] = _Place(RunningSequence(self.target, drafter, request, cache), own)

    def remove(self, key: Any) -> None:
        """Give up a sequence that has not ended; its rows are freed.

        Raises:
            RuntimeError: if another sequence has taken the permit.
        """
        with self._in_permit():
            self._free.append(self._leave(key).own)

    def close(self) -> None:
        """Give the permit back; sequences under way go with the batch."""
        self.permit.end()

    @contextmanager
    def _in_permit(self) -> Iterator[None]:
        """Have the permit within the block, and until no sequence is under way."""
        try:
            with self.permit.step():
                yield
        finally:
            if not self._places:
                self.permit.end()

    def _leave(self, key: Any, is_whole: bool = True) -> _Place:
        """Let a sequence leave; its rows are kept for others if they are `is_whole`, as after no failure."""
        place = self._places.pop(key)
        if self._prefix_cache is not None and is_whole:
            self._prefix_cache.store(place.sequence.cache, place.sequence.tokens)
        if self._passes is not None:
            self._passes.release(place.sequence.cache)
        return place

    def _next_drafter(self) -> Drafter:
        """Return a drafter for a sequence to come, with the memory that it begins with."""
        mine = self._drafter
        if self._shares_memory:
            return self._free.pop() if self._free else mine.sibling()
        if self._free:
            drafter = self._free.pop()
            drafter.reset()
        else:
            drafter = type(mine)(mine.config, mine.vocab_size, mine.device)
            drafter.check_target(self.target)
        if not mine.needs.cold_start and (memory := mine.memory()):
            drafter.load_memory(memory)
        return drafter

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Read the next chunks of prompts, decode a step of every sequence whose prompt is read; return the
        results.

        Raises:
            RuntimeError: if another sequence has taken the permit.
        """
        with self._in_permit():
            events, records = self._stepped()
            for event in events:
                self._leave(event.key, is_whole=False)  # its drafter is not used again
                _free_frames(event.error)
            return events + [self._event(key, record) for key, record in records.items()]

    def _stepped(self) -> tuple[list[Event], dict[Any, StepRecord]]:
        """Return the events of the sequences that fail, and the steps of the others.

        This holds sequences, and `step` must not: frames are cleared of what has ended (`_free_frames`).
        """
        events = self._read_prompts()
        places = self._places.items()
        sequences = {key: place.sequence for key, place in places if place.reading is None}
        if self._passes is None:
            return events, _each(sequences, lambda key, sequence: step_of(sequence), events)
        return events, self._decoded(sequences, self._passes, events) if sequences else {}

    def _event(self, key: Any, record: StepRecord) -> Event:
        """Note a sequence's step, with its prompt if it is the first one; let it leave if it has ended."""
        place = self._places[key]
        record.prefill_ns, place.prefill_ns = place.prefill_ns, 0
        record.num_cached = 0 if place.steps else place.sequence.num_cached
        place.steps.append(record)
        if record.stop_reason is not None:
            self._free.append(self._leave(key).own)
        return Event(key, record, steps=place.steps)

    def _read_prompts(self) -> list[Event]:
        """Read prompts in the order in which they came, as many whole chunks as make `PREFILL_CHUNK` tokens; return
        the events of those that fail.
        """
        failed, num_read = [], 0
        for key, place in self._places.items():
            if place.reading is None or num_read >= PREFILL_CHUNK:
                continue
            timer = StepTimer()
            try:
                while place.reading is not None and num_read < PREFILL_CHUNK:
                    if (count := next(place.reading, None)) is None:
                        place.reading = None
                    else:
                        num_read += count
                self.target.synchronize()
            except Exception as error:  # of this sequence's drafter
                failed.append(Event(key, error=error))
            place.prefill_ns += timer.end("prefill")
        return failed

    def _decoded(
        self, sequences: dict[Any, RunningSequence], passes: SharedPasses, events: list[Event]
    ) -> dict[Any, StepRecord]:
        """Decode a step of these sequences in one pass; a sequence that fails has an event instead."""
        timer, num_prepared = StepTimer(), self.target.num_prepared
        context = sum(sequence.cache.length for sequence in sequences.values()) / len(sequences)
        trees = self._proposed(sequences, context, events)
        timer.end("draft")
        if not trees:
            return {}
        chosen = {key: sequences[key] for key in trees}
        done, hidden = _pass(passes, list(chosen.values()), list(trees.values()))
        timer.end("forward")
        reads = done.read(
            max(sequence.num_read for sequence in chosen.values()),
            any(sequence.needs.logit_samples for sequence in chosen.values()),
        )
        timer.end("verify")
        parts = dict(zip(trees, zip(done.logits, hidden, reads, strict=True), strict=True))

        def concluded(key: Any, sequence: RunningSequence) -> StepRecord:
            logits, rows, read = parts[key]
            return sequence.conclude(trees[key], logits, rows, timer, lambda *_: read)

        records = _each(chosen, concluded, events)
        for record in records.values():
            record.set_times(timer, len(trees))
        is_usual = len(records) == len(trees) and self.target.num_prepared == num_prepared
        if self._budget is not None and is_usual:
            num_nodes = sum(tree.topology.num_nodes for tree in trees.values())
            num_tokens = sum(len(record.tokens) for record in records.values())
            self._budget.learn(len(trees), num_nodes, num_tokens, context, sum(timer.parts()))
        return records

    def _proposed(
        self, sequences: dict[Any, RunningSequence], context: float, events: list[Event]
    ) -> dict[Any, DraftTree]:
        """Return the drafts of all sequences; a sequence whose drafter fails has an event instead."""
        budget = self._budget
        if budget is None:
            return _each(sequences, lambda key, sequence: sequence.propose(), events)
        if budget.is_paused(len(sequences)):
            return {key: sequence.pause() for key, sequence in sequences.items()}
        limits = budget.offered(len(sequences))
        offers = _each(sequences, lambda key, sequence: sequence.offer(*limits), events)
        known = {key: gains for key, gains in offers.items() if gains is not None}
        shares = budget.share(list(known.values()), len(offers), context)
        counts = dict(zip(known, shares, strict=True))

        def taken(key: Any, sequence: RunningSequence) -> DraftTree:
            return sequence.take(counts[key]) if key in counts else sequence.propose()

        return _each({key: sequences[key] for key in offers}, taken, events)


def run(batch: Batch, asked: Iterator[tuple[Any, Request | Exception]]) -> Iterator[Event]:
    """Let sequences join an empty batch as long as there is room, and yield the last event of each, answers first.

    What is asked for, or the error that stands for it, is taken with its key when there is room for its sequence,
    and after the events that have made room.
    """
    while True:
        while batch.has_capacity and (one := next(asked, None)) is not None:
            key, request = one
            if isinstance(request, Exception):
                yield Event(key, error=request)
            else:
                batch.add(key, request)
        if not len(batch):
            return
        last = [event for event in batch.step() if event.is_last]
        yield from sorted(last, key=lambda event: event.error is not None)


def _each(
    sequences: dict[Any, RunningSequence],
    function: Callable[[Any, RunningSequence], Result],
    events: list[Event],
) -> dict[Any, Result]:
    """Return the function's result for each sequence; for one that raises there is an event instead."""
    found = {}
    for key, sequence in sequences.items():
        try:
            found[key] = function(key, sequence)
        except Exception as error:  # of this sequence's drafter, rule or criterion
            events.append(Event(key, error=error))
    return found


def _pass(
    passes: SharedPasses, sequences: Sequence[RunningSequence], trees: Sequence[DraftTree]
) -> tuple[SharedPass, Sequence[torch.Tensor | None]]:
    """Run a pass over the trees of these sequences; return it, and the hidden states of each if they are wanted."""
    is_plain = passes.is_plain(len(sequences))
    for sequence, tree in zip(sequences, trees, strict=True):
        sequence.before_pass(tree, is_plain)
    caches, hidden = [sequence.cache for sequence in sequences], sequences[0].hidden
    if hidden is None:
        return passes.forward(trees, caches), [None] * len(sequences)
    sizes = [tree.topology.num_nodes for tree in trees]
    with hidden.captured():
        done = passes.forward(trees, caches)
        return done, hidden.take(sum(sizes)).split(sizes)


def _free_frames(error: BaseException | None) -> None:
    """Clear the ended frames of an error: else whoever keeps the error keeps the rows of all sequences."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            callers: Any = frame
            while callers is not None:
                try:
                    callers.clear()
                except RuntimeError:  # it runs, as do its callers
                    break
                callers = callers.f_back
        error = error.__cause__ or error.__context__
