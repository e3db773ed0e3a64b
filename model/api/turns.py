"""Turns: the texts of one decoder, one at a time, whatever threads they come from.

A text waits for the one under way. It is refused, before anything is touched, if that one is open and was not
continued for a while. The main thread cannot wait for a text that it has left open itself, as in a notebook
after an interrupt: there the new text takes the turn.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..machine.hardware import give_back_threads

# Seconds without a step after which others stop waiting for an open text.
PATIENCE = 30.0
# Seconds after which those who wait look again.
PAUSE = 0.5
ADVICE = "one text at a time; close its stream, or give each text a decoder of its own: decoder.session()"


class Turns:
    """Which text has the turn.

    Attributes:
        step: held while a step is computed; whoever reads or writes the decoder's memory meanwhile takes it.
    """

    def __init__(self) -> None:
        self.step = threading.RLock()
        # Reentrant: a stream that is collected while its thread waits here ends its turn.
        self._changed = threading.Condition(threading.RLock())
        self._text: object = None  # has the turn
        self._thread: threading.Thread | None = None  # ran its last step
        self._is_stepping = False
        self._last_step = 0.0

    def begin(self) -> object:
        """Wait for the turn; return what stands for the text that has it now.

        Raises:
            RuntimeError: if the text that has it was left open.
        """
        with self._changed:
            while self._text is not None and not self._is_left_by_this_thread():
                is_idle = not self._is_stepping
                if is_idle and time.monotonic() - self._last_step >= PATIENCE:
                    raise RuntimeError(
                        f"decoder: another of its texts is still open, and was not continued for {PATIENCE:g} s; "
                        f"allowed: {ADVICE}"
                    )
                if not self._changed.wait(min(PAUSE, PATIENCE)) and is_idle:
                    # Web servers leave the stream of a client that is gone in a cycle of references.
                    gc.collect()
            self._text = text = object()
            self._note()
            return text

    def end(self, text: object) -> None:
        """Give the turn back, if this text still has it; the next text may be another thread's."""
        with self._changed:
            if self._text is text:
                give_back_threads()
                self._text = None
                self._changed.notify()

    @contextmanager
    def stepping(self, text: object) -> Iterator[None]:
        """Compute a step of a text within the block.

        Raises:
            RuntimeError: if another text has taken the turn.
        """
        with self.step:
            with self._changed:
                if self._text is not text:
                    raise RuntimeError(
                        f"stream: got a further step of a text after another was begun; allowed: {ADVICE}"
                    )
                self._is_stepping = True
            try:
                yield
            finally:
                with self._changed:
                    self._is_stepping = False
                    self._note()

    def _note(self) -> None:
        self._thread = threading.current_thread()
        self._last_step = time.monotonic()

    def _is_left_by_this_thread(self) -> bool:
        this = threading.current_thread()
        return this is threading.main_thread() and this is self._thread and not self._is_stepping
