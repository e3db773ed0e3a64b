"""Permits: the sequences of one decoder, one at a time, whatever threads they come from; a batch is one sequence.

A sequence waits for the one under way. It is refused, before anything is touched, if that one is open and was not
continued for a while. The main thread cannot wait for a sequence that it has left open itself, as in a notebook
after an interrupt: there the new sequence takes the permit.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager

from ..backends.passes.prefix_cache import PrefixCache
from ..backends.proofs.packing import batch_of
from ..backends.proofs.self_test import prove_changes
from ..backends.target import TargetModel
from ..budget.paced import BatchBudget, batch_budget
from ..engine.batch import Batch, Permit, run
from ..engine.drafter import Drafter
from ..engine.loop import steps_of
from ..engine.sequence import Request
from ..engine.step import StepRecord
from ..machine.hardware import give_back_threads
from ..options import integer

# Seconds without a step after which others stop waiting for an open sequence.
PATIENCE = 30.0
# Seconds after which those who wait look again.
PAUSE = 0.5
ADVICE = "one text at a time; close its stream, or give each text a decoder of its own: decoder.session()"


class Permits:
    """Which sequence of a decoder has the permit.

    There are two locks, and `step` is taken before `changed`. A sequence waits for its permit on `changed` alone,
    so that the sequence under way can go on.
    """

    def __init__(self) -> None:
        # Held while a step is computed; whoever reads or writes the decoder's memory meanwhile takes it.
        # Reentrant: a processor, which is called within a step, may do so.
        self.step = threading.RLock()
        # Held while the fields below are read or written, and never while a step is computed.
        # Reentrant: a stream that is collected while its thread waits here gives its permit back.
        self.changed = threading.Condition(threading.RLock())
        self.holder: SequencePermit | None = None
        self.thread: threading.Thread | None = None  # that ran the holder's last step
        self.is_stepping = False
        self.last_step = 0.0  # when the last one ended, by `time.monotonic`

    def note_step(self) -> None:
        """Note that the holder was continued, by this thread."""
        self.thread = threading.current_thread()
        self.last_step = time.monotonic()

    def is_left_by_this_thread(self) -> bool:
        """Whether the main thread itself has left the holder open."""
        this = threading.current_thread()
        return this is threading.main_thread() and this is self.thread and not self.is_stepping


class SequencePermit(Permit):
    """The permit of a sequence: it waits for it at its first step, and has it until it ends."""

    def __init__(self, permits: Permits) -> None:
        self._permits = permits
        self._is_begun = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Compute a step of the sequence within the block; wait for the permit first, if it was not begun.

        Raises:
            RuntimeError: if another sequence has taken the permit, or was left open.
        """
        permits = self._permits
        if not self._is_begun:
            self._begin()
            self._is_begun = True
        with permits.step:
            with permits.changed:
                if permits.holder is not self:
                    raise RuntimeError(
                        f"stream: got a further step of a text after another was begun; allowed: {ADVICE}"
                    )
                permits.is_stepping = True
            try:
                yield
            finally:
                with permits.changed:
                    permits.is_stepping = False
                    permits.note_step()

    def end(self) -> None:
        """Give the permit back, if this sequence still has it; the next sequence may be another thread's."""
        permits = self._permits
        self._is_begun = False
        with permits.changed:
            if permits.holder is self:
                give_back_threads()
                permits.holder = None
                permits.changed.notify()

    def _begin(self) -> None:
        permits = self._permits
        with permits.changed:
            while permits.holder is not None and not permits.is_left_by_this_thread():
                is_idle = not permits.is_stepping
                if is_idle and time.monotonic() - permits.last_step >= PATIENCE:
                    raise RuntimeError(
                        f"decoder: another of its texts is still open, and was not continued for {PATIENCE:g} s; "
                        f"allowed: {ADVICE}"
                    )
                if not permits.changed.wait(min(PAUSE, PATIENCE)) and is_idle:
                    # Web servers leave the stream of a client that is gone in a cycle of references.
                    gc.collect()
            permits.holder = self
            permits.note_step()


class SequenceQueue:
    """The sequences of a decoder, which take permits: token ids in, steps out.

    Two things live on from sequence to sequence: the method's memory and the KV cache of the last sequence. Batches
    use the memory alone.
    """

    def __init__(self, target: TargetModel, drafter: Drafter) -> None:
        self.target, self.drafter = target, drafter
        self.permits = Permits()
        self._prefix_cache = PrefixCache()
        self._budget: BatchBudget | None = None  # of all batches

    def check_model(self) -> None:
        """Raise ValueError if the model was changed since, so that it cannot be used."""
        self.target.check_unchanged()
        prove_changes(self.target)

    def steps_of(self, request: Request) -> Generator[StepRecord, None, None]:
        """Return the steps of a sequence.

        The first one waits for the sequence under way. The permit ends with the last one, or with the iteration.
        A method with a cold start uses neither memory nor cache: it must read a prompt to learn from it.

        Raises:
            ValueError: as `Request.checked` and `check_model`. At once.
            RuntimeError: at a step, if another sequence has the permit.
        """
        self.check_model()
        request.checked(self.target)
        return self._permitted(steps_of(self.target, self.drafter, request, self._prefix_cache))

    def _permitted(self, running: Iterator[StepRecord]) -> Generator[StepRecord, None, None]:
        permit = SequencePermit(self.permits)
        try:
            with permit.step():
                if self.drafter.needs.cold_start:
                    self.reset()
            stop_reason = None
            while stop_reason is None:
                with permit.step():
                    step = next(running)
                    stop_reason = step.stop_reason
                    if stop_reason is not None:
                        deque(running, maxlen=0)  # steps past the limit, which are unseen
                if stop_reason is not None:
                    permit.end()
                yield step
        finally:
            permit.end()

    def steps_of_all(self, requests: Sequence[Request]) -> list[Sequence[StepRecord]]:
        """Decode sequences side by side; return the steps of each. If one fails, the others are given up."""
        self.check_model()
        for request in requests:
            request.checked(self.target)
        found: dict[int, Sequence[StepRecord]] = {}
        with closing(self.batch(len(requests))) as batch:
            for event in run(batch, enumerate(requests)):
                if event.error is not None:
                    raise event.error
                found[event.key] = event.steps
        return [found[index] for index in range(len(requests))]

    def batch(self, size: int, shares_memory: bool = True) -> Batch:
        """Return an empty batch, whose sequences have the permit together."""
        size = integer("batch_size", size, least=1)
        if size != 1 and self._budget is None:
            self._budget = batch_budget(self.drafter, self.target)
        permit = SequencePermit(self.permits)
        return batch_of(self.target, self.drafter, size, self._budget, shares_memory, permit)

    def reset(self) -> None:
        """Forget what the method has learned and the last sequence, and free its rows."""
        with self.permits.step:
            self.drafter.reset()
            self._prefix_cache.clear()
