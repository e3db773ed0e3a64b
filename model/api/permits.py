"""Permits: the sequences of one decoder, one at a time, whatever threads they come from; a batch is one sequence.

A sequence waits for the one under way. It is refused, before anything is touched, where it could wait for ever: at
once if its thread is within the other one, which calls user code, or within a pass of the model; after a while if
the other one is open and was not continued. A thread cannot wait for a sequence that it has left open itself, as in
a notebook after an interrupt: there the new sequence takes the permit.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar

from ..backends.passes.prefix_cache import PrefixCache
from ..backends.proofs.packing import batch_of
from ..backends.target import TargetModel
from ..budget.paced import BatchBudget, batch_budget
from ..engine.batch import Batch, Permit, run
from ..engine.drafter import Drafter
from ..engine.loop import steps_of
from ..engine.rules import USER_CODE
from ..engine.sequence import Request
from ..engine.step import StepRecord
from ..machine.hardware import give_back_threads
from ..machine.locks import FORKED, SHARED, SharedLock
from ..options import integer

# Seconds without a step after which others stop waiting for an open sequence.
PATIENCE = 30.0
# Seconds after which those who wait look again.
PAUSE = 0.5
ADVICE = "one text at a time; close its stream, or give each text a decoder of its own: decoder.session()"
WITHIN = (
    "generate: got a call from within another text or a pass of the model, as by a processor, a streamer, an "
    "iterable of prompts or a hook; allowed: the model's own generate, and outside of passes decoder.session()"
)
# Of this flow of calls: the permit of the sequence that it continued last.
_CONTINUED: ContextVar[SequencePermit | None] = ContextVar("continued", default=None)


class Permits:
    """Which sequence of a decoder has the permit.

    Args:
        model_lock: of the decoder's model, held within its passes.
    """

    def __init__(self, model_lock: SharedLock) -> None:
        self._model_lock = model_lock
        self._is_lost = False
        self.holder: SequencePermit | None = None
        self.threads: set[threading.Thread] = set()  # that have run steps of the holder
        self.stepper: int | None = None  # the thread that computes a step of the holder
        self.caller: int | None = None  # the thread in which the holder runs the user's code
        self.last_step = 0.0  # when the last one ended, by `time.monotonic`
        # Held while these fields are read or written, and the decoder's memory by others than a step; never while a
        # step is computed. Reentrant: a stream that is collected while its thread waits here gives its permit back.
        self.changed = threading.Condition(threading.RLock())
        SHARED.add(self)

    def after_fork(self) -> None:
        """Forget a sequence of a thread that is not there; one of the thread that forked goes on."""
        self.changed = threading.Condition(threading.RLock())
        self._is_lost = self.stepper not in (None, threading.get_ident())
        if threading.current_thread() not in self.threads:
            self.holder = self.caller = None

    @contextmanager
    def memory(self) -> Iterator[None]:
        """Read or write the decoder's memory within the block: between steps, or in a step of this thread."""
        if self._is_lost:
            raise RuntimeError(FORKED)
        with self.changed:
            while self.stepper not in (None, threading.get_ident()):
                self.changed.wait()
            yield

    def check_outside(self) -> None:
        """Raise RuntimeError in a thread that is within a sequence of this decoder or a pass of its model."""
        if self._is_lost:
            raise RuntimeError(FORKED)
        if self._model_lock.is_mine or threading.get_ident() in (self.stepper, self.caller):
            raise RuntimeError(WITHIN)

    def note_step(self, stepper: int | None) -> None:
        """Note that the holder is continued by this thread, or was."""
        self.threads.add(threading.current_thread())
        self.stepper, self.last_step = stepper, time.monotonic()
        self.changed.notify_all()

    def is_left_here(self) -> bool:
        """Whether this thread itself has left the holder open, so that nobody else continues it.

        Threads of a pool continue others' sequences, each call in a context of its own.
        """
        this = threading.current_thread()
        is_own = this is threading.main_thread() or _CONTINUED.get() is self.holder
        return is_own and self.threads == {this} and self.stepper is None


class SequencePermit(Permit):
    """The permit of a sequence: it waits for it at its first step, and has it until it ends."""

    def __init__(self, permits: Permits) -> None:
        self._permits = permits
        self._is_begun = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Compute a step of the sequence within the block; wait for the permit first, if it was not begun.

        Raises:
            RuntimeError: if another sequence has taken the permit, or was left open; as `Permits.check_outside`.
        """
        self._permits.check_outside()
        if not self._is_begun:
            self._begin()
            self._is_begun = True
        _CONTINUED.set(self)
        token = USER_CODE.set(self.user_code)
        try:
            self._hold()
            yield
        finally:
            USER_CODE.reset(token)
            self._let_go()

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """Run the user's code within the block, also in a step: nobody waits for its end longer than for a step."""
        permits = self._permits
        is_step, before = permits.stepper == threading.get_ident(), permits.caller
        if permits.holder is self:
            permits.caller = threading.get_ident()
        self._let_go()
        try:
            yield
        finally:
            permits.caller = before
            if is_step:
                self._hold()

    def end(self) -> None:
        """Give the permit back, if this sequence still has it; the next sequence may be another thread's."""
        permits = self._permits
        self._is_begun = False
        with permits.changed:
            if permits.holder is self:
                give_back_threads()
                permits.holder = None
                permits.changed.notify_all()

    def _hold(self) -> None:
        permits = self._permits
        with permits.changed:
            if permits.holder is not self:
                raise RuntimeError(
                    f"stream: got a further step of a text after another was begun; allowed: {ADVICE}"
                )
            permits.note_step(threading.get_ident())

    def _let_go(self) -> None:
        permits = self._permits
        if permits.stepper == threading.get_ident():
            with permits.changed:
                permits.note_step(None)

    def _begin(self) -> None:
        permits = self._permits
        with permits.changed:
            while permits.holder is not None and not permits.is_left_here():
                is_idle = permits.stepper is None
                if is_idle and time.monotonic() - permits.last_step >= PATIENCE:
                    raise RuntimeError(
                        f"decoder: another of its texts is still open, and was not continued for {PATIENCE:g} s; "
                        f"allowed: {ADVICE}"
                    )
                if not permits.changed.wait(min(PAUSE, PATIENCE)) and is_idle:
                    # Web servers leave the stream of a client that is gone in a cycle of references.
                    gc.collect()
            permits.holder, permits.threads = self, set()
            permits.note_step(None)


class SequenceQueue:
    """The sequences of a decoder, which take permits: token ids in, steps out.

    Two things live on from sequence to sequence: the method's memory, and the KV caches of earlier sequences.
    """

    def __init__(self, target: TargetModel, drafter: Drafter) -> None:
        self.target, self.drafter = target, drafter
        self.permits = Permits(target.lock)
        self.prefix_cache = PrefixCache()
        self._budget: BatchBudget | None = None  # of all batches

    def check_model(self) -> None:
        """Raise ValueError if the model was changed so that it cannot be used, RuntimeError as `check_outside`."""
        self.permits.check_outside()
        self.target.check_model()

    def steps_of(self, request: Request) -> Generator[StepRecord, None, None]:
        """Return the steps of a sequence.

        The first one waits for the sequence under way. The permit ends with the last one, or with the iteration.
        A method with a cold start uses neither memory nor cache: it must read a prompt to learn from it.

        Raises:
            ValueError: as `Request.checked`. At once.
            RuntimeError: as `Permits.check_outside`; at a step, if another sequence has the permit.
        """
        self.permits.check_outside()
        request.checked(self.target)
        return self._permitted(steps_of(self.target, self.drafter, request, self.prefix_cache))

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
        self.permits.check_outside()
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
        self.permits.check_outside()
        if size != 1 and self._budget is None:
            self._budget = batch_budget(self.drafter, self.target)
        permit = SequencePermit(self.permits)
        return batch_of(
            *(self.target, self.drafter, size, self._budget, shares_memory, permit),
            self.prefix_cache,
        )

    def reset(self) -> None:
        """Forget what the method has learned and earlier sequences, and free their rows."""
        with self.permits.memory():
            self.drafter.reset()
            self.prefix_cache.clear()
