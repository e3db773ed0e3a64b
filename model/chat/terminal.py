"""What the chat needs of a terminal: harmless text, colours, and a Ctrl-C that waits for a step."""

from __future__ import annotations

import os
import signal
import threading
import unicodedata
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TextIO

# Set Graphics Rendition codes (ECMA-48): two colours that are told apart on light and dark ground.
RUN_COLOURS = (36, 35)
DIM = 2
# They turn the order of the text around them: what is read is not what is there (Unicode TR 36).
BIDI_CONTROLS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str) -> str:
    r"""Return untrusted text with every character that could steer a terminal spelled out (\x1b).

    Line feeds and tabs stay. Lone surrogates, which no stream can encode, are spelled out as well.
    """
    return "".join(_spelled(character) for character in text)


def _spelled(character: str) -> str:
    is_control = unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t"
    if is_control or character in BIDI_CONTROLS:
        return ascii(character)[1:-1]
    return character


def has_colours(stream: TextIO) -> bool:
    """Whether a stream shows colours: a terminal that is not dumb, without NO_COLOR
    (https://no-color.org).
    """
    return (
        stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") != "dumb"
    )


def painter(stream: TextIO) -> Callable[[str, int], str]:
    """Return the function that puts text for this stream into a colour (SGR code); it leaves the
    text alone where there are no colours.
    """
    if not has_colours(stream):
        return lambda text, _: text
    return lambda text, colour: f"\x1b[{colour}m{text}\x1b[0m" if text else ""


class Interrupt:
    """Within its block the first Ctrl-C is noted, and the second raises KeyboardInterrupt.

    So an answer stops between two steps, where everything that the decoder keeps is whole, and a run
    between two questions. Outside the main thread, which signals do not reach, nothing is noted.

    Args:
        message: line that the first Ctrl-C writes to stderr.

    Attributes:
        is_noted: whether Ctrl-C was pressed.
    """

    def __init__(self, message: str = "") -> None:
        self.is_noted = False
        self._message = f"\n{message}\n".encode() if message else b""
        self._previous: Any = None
        self._is_ours = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Interrupt:
        """Take over the signal."""
        if self._is_ours:
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the signal back."""
        if self._is_ours:
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_noted:
            raise KeyboardInterrupt
        self.is_noted = True
        if self._message:
            os.write(2, self._message)  # not print: a signal may come in the middle of one
