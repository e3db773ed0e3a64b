"""Terminal output of the chat: safe text and colours."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable
from typing import TextIO

# Set Graphics Rendition codes (ECMA-48): two colours that differ well on light and dark backgrounds.
RUN_COLOURS = (36, 35)
DIM = 2
# They reorder the text around them, so that it reads as something else (Unicode TR 36).
BIDI_CONTROLS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str) -> str:
    r"""Return untrusted text with every character that could control a terminal escaped (\x1b).

    Line feeds and tabs stay. Lone surrogates, which no stream can encode, are escaped too.
    """
    return "".join(_spelled(character) for character in text)


def _spelled(character: str) -> str:
    is_control = unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t"
    if is_control or character in BIDI_CONTROLS:
        return ascii(character)[1:-1]
    return character


def has_colours(stream: TextIO) -> bool:
    """Whether a stream shows colours: a terminal, not dumb, NO_COLOR not set (https://no-color.org)."""
    return (
        stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") != "dumb"
    )


def painter(stream: TextIO) -> Callable[[str, int], str]:
    """Return a function that colours text (SGR code) for this stream, or leaves it if there are no colours."""
    if not has_colours(stream):
        return lambda text, _: text
    return lambda text, colour: f"\x1b[{colour}m{text}\x1b[0m" if text else ""
