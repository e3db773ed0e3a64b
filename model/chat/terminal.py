"""What the chat needs of a terminal: harmless text and colours."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable
from typing import TextIO

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
