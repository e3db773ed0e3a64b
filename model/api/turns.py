"""Turns: the texts of one decoder, one at a time, whatever threads they come from; a batch is one text.

A text waits for the one under way. It is refused, before anything is touched, if that one is open and was not
continued for a while. The main thread cannot wait for a text that it has left open itself, as in a notebook
after an interrupt: there the new text takes the turn.
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
from ..engine.batch import Batch, Turn, run
from ..engine.drafter import Drafter
from ..engine.loop import steps_of
from ..engine.step import StepRecord
from ..engine.text import Request
from ..machine.hardware import give_back_threads
from ..options import integer

# Seconds without a step after which others stop waiting for an open text.
PATIENCE = 30.0
# Seconds after which those who wait look again.
PAUSE = 0.5
ADVICE = "one text at a time; close its stream, or give each text a decoder of its own: decoder.session()"


class Turns:
    """Which text of a decoder has the turn.

    There are two locks, and `step` is taken before `changed`. A text waits for its turn on `changed` alone, so that
    the text under way can go on.

    """

    def __init__(self) -> None:
        # Held while a step is computed; whoever reads or writes the decoder's memory meanwhile takes it.
        # Reentrant: a processor, which is called within a step, may do so.
        self.step = threading.RLock()
        # Held while the fields below are read or written, and never while a step is computed.
        # Reentrant: a stream that is collected while its thread waits here ends its turn.
        self.changed = threading.Condition(threading.RLock())
        self.holder: TextTurn | None = None
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


class TextTurn(Turn):
    """The turn of a text: it waits for it at its first step, and has it until it ends."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._is_begun = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Compute a step of the text within the block; wait for the turn first, if it was not begun.

        Raises:
            RuntimeError: if another text has taken the turn, or was left open.
        """
        turns = self._turns
        if not self._is_begun:
            self._begin()
            self._is_begun = True
        with turns.step:
            with turns.changed:
                if turns.holder is not self:
                    raise RuntimeError(
                        f"stream: got a further step of a text after another was begun; allowed: {ADVICE}"
                    )
                turns.is_stepping = True
            try:
                yield
            finally:
                with turns.changed:
                    turns.is_stepping = False
                    turns.note_step()

    def end(self) -> None:
        """Give the turn back, if this text still has it; the next text may be another thread's."""
        turns = self._turns
        self._is_begun = False
        with turns.changed:
            if turns.holder is self:
                give_back_threads()
                turns.holder = None
                turns.changed.notify()

    def _begin(self) -> None:
        turns = self._turns
        with turns.changed:
            while turns.holder is not None and not turns.is_left_by_this_thread():
                is_idle = not turns.is_stepping
                if is_idle and time.monotonic() - turns.last_step >= PATIENCE:
                    raise RuntimeError(
                        f"decoder: another of its texts is still open, and was not continued for {PATIENCE:g} s; "
                        f"allowed: {ADVICE}"
                    )
                if not turns.changed.wait(min(PAUSE, PATIENCE)) and is_idle:
                    # Web servers leave the stream of a client that is gone in a cycle of references.
                    gc.collect()
            turns.holder = self
            turns.note_step()


class Texts:
    """The texts of a decoder, which take turns: token ids in, steps out.

    Two things live on from text to text: the method's memory and the KV cache of the last text. Batches use the
    memory alone.
    """

    def __init__(self, target: TargetModel, drafter: Drafter) -> None:
        self.target, self.drafter = target, drafter
        self.turns = Turns()
        self._prefix_cache = PrefixCache()
        self._budget: BatchBudget | None = None  # of all batches

    def check_model(self) -> None:
        """Raise ValueError if the model was changed since, so that it cannot be used."""
        self.target.check_unchanged()
        prove_changes(self.target)

    def steps_of(self, request: Request) -> Generator[StepRecord, None, None]:
        """Return the steps of a text.

        The first one waits for the text under way. The turn ends with the last one, or with the iteration.
        A method with a cold start uses neither memory nor cache: it must read a prompt to learn from it.

        Raises:
            ValueError: as `Request.checked` and `check_model`. At once.
            RuntimeError: at a step, if it is another text's turn.
        """
        self.check_model()
        request.checked(self.target)
        return self._in_turn(steps_of(self.target, self.drafter, request, self._prefix_cache))

    def _in_turn(self, running: Iterator[StepRecord]) -> Generator[StepRecord, None, None]:
        turn = TextTurn(self.turns)
        try:
            with turn.step():
                if self.drafter.needs.cold_start:
                    self.reset()
            stop_reason = None
            while stop_reason is None:
                with turn.step():
                    step = next(running)
                    stop_reason = step.stop_reason
                    if stop_reason is not None:
                        deque(running, maxlen=0)  # steps past the limit, which are unseen
                if stop_reason is not None:
                    turn.end()
                yield step
        finally:
            turn.end()

    def steps_of_all(self, requests: Sequence[Request]) -> list[Sequence[StepRecord]]:
        """Decode texts side by side; return the steps of each. If one fails, the others are given up."""
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
        """Return an empty batch, whose texts have the turn together."""
        size = integer("batch_size", size, least=1)
        if size != 1 and self._budget is None:
            self._budget = batch_budget(self.drafter, self.target)
        turn = TextTurn(self.turns)
        return batch_of(self.target, self.drafter, size, self._budget, shares_memory, turn)

    def reset(self) -> None:
        """Forget what the method has learned and the last text, and free its rows."""
        with self.turns.step:
            self.drafter.reset()
            self._prefix_cache.clear()
