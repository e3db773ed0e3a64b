"""A delayed Ctrl-C: it takes effect after the step (chat) or after the question (runs)."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

# Message of the first Ctrl-C in a run of questions.
FINISHING = "interrupted: finishing this question; Ctrl-C again to stop at once"


def hide_interrupts(package: str) -> None:
    """Let Ctrl-C end `python -m PACKAGE.COMMAND` without a traceback until `show_interrupts`: imports take seconds.

    Nothing changes in a program that imports the package.
    """
    is_command = sys.argv[:1] == ["-m"]  # until its packages are imported
    handler = signal.getsignal(signal.SIGINT)  # ignored in the background
    names = [word.removeprefix("-m").partition(".")[0] for word in sys.orig_argv]
    if is_command and package in names and handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def show_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, if it was not ignored from the beginning."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Interrupt:
    """Within its block the first Ctrl-C is noted, with a line on stderr, and the second raises KeyboardInterrupt.

    So an answer stops between two steps, when the decoder's state is consistent, and a run between
    two questions. In other threads than the main one, which get no signals, nothing is noted.
    """

    def __init__(self, message: str = "") -> None:
        self.is_noted = False
        self._message = f"\n{message}\n".encode() if message else b""
        self._previous: Any = None
        self._is_ours = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Interrupt:
        if self._is_ours:
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_noted:
            raise KeyboardInterrupt
        self.is_noted = True
        if self._message:
            os.write(2, self._message)  # not print: the signal may interrupt one
