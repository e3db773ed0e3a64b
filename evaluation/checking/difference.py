"""Where the answers to one question first part in two answer files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the answers to one question first part; indices count from 0.

    Attributes:
        cause: what differs, in words.
        choice: index of the choice, None if the whole row differs.
        turn: index of the turn, None if the whole choice or row differs.
        unit: what `position` counts, `token` or `character`; None without a position.
        position: first differing token or character in the turn.
        excerpts: the first file's and the second's tokens or characters around it.
        texts: the two texts around their first differing character, if token ids were compared.
        parts_at_tokens: whether both have a token at the position: neither ends before it.
    """

    question_id: int | str
    category: str
    cause: str
    choice: int | None = None
    turn: int | None = None
    unit: str | None = None
    position: int | None = None
    excerpts: tuple[str, str] | None = None
    texts: tuple[str, str] | None = None
    parts_at_tokens: bool = False
