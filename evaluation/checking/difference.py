"""Where the answers to one question first part in two answer files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the answers to one question first part; indices count from 0.

    Attributes:
        question_id: The question.
        category: Its category.
        cause: What differs, in words.
        choice: Index of the choice, None if the whole row differs.
        turn: Index of the turn, None if the whole choice or row differs.
        unit: What ``position`` counts, ``token`` or ``character``; None without a position.
        position: First differing token or character in the turn.
        excerpts: The first file's and the second's tokens or characters around it.
        texts: The two texts around their first differing character, if token ids were compared.
        parts_at_tokens: Whether both have a token at the position: neither ends before it.
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
