"""A reader of hidden states reads nothing until it guesses, and then all that came, in order.

Run: pytest tests/model/methods/heads/test_state_reader.py
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from model.engine.drafter import VerifiedStep
from model.methods.heads.drafter import MOST_UNREAD, StateReader


class NotedText:
    """A text that notes what it reads."""

    def __init__(self) -> None:
        self.chunks: list[tuple[list[int], list[float]]] = []

    def clear(self) -> None:
        self.chunks.clear()

    def read(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        self.chunks.append((list(token_ids), hidden[:, 0].tolist()))

    def sibling(self) -> NotedText:
        return NotedText()


class Reader(StateReader[NotedText]):
    def _text_of(self, target: Any) -> NotedText:
        return NotedText()


def reader() -> Reader:
    found = Reader(None, 99, torch.device("cpu"))
    target: Any = SimpleNamespace(config=None)
    found.check_config = lambda config: None  # type: ignore[method-assign]
    found.for_target(target)
    found.start([1, 2])
    return found


def step(path: list[int], tokens: list[int], stop_reason: str | None = None) -> VerifiedStep:
    """Return a step over four nodes, whose hidden states are their numbers."""
    acceptance: Any = SimpleNamespace(path=path, tokens=tokens)
    tree: Any = None
    return VerifiedStep(tree, acceptance, stop_reason, torch.arange(4.0)[:, None])


def test_nothing_is_read_until_it_is_asked() -> None:
    one = reader()
    one.observe(step([0], [7]))
    one.observe(step([0, 2, 3], [8, 9, 10]))
    text = one.read_text()
    assert text is not None
    assert text.chunks == [([7, 8, 9, 10], [0.0, 0.0, 2.0, 3.0])]
    assert one.read_text() is text
    assert len(text.chunks) == 1


def test_a_long_rest_keeps_no_more_states_than_allowed() -> None:
    one = reader()
    for _ in range(MOST_UNREAD + 1):
        one.observe(step([0], [7]))
    text = one._text
    assert text is not None
    assert [len(tokens) for tokens, _ in text.chunks] == [MOST_UNREAD + 1]


def test_another_text_and_a_sibling_begin_without_states() -> None:
    one = reader()
    one.observe(step([0], [7]))
    other = one.sibling().read_text()
    one.observe(step([0], [8], stop_reason="eos"))
    one.start([3, 4])
    text = one.read_text()
    assert other is not None
    assert text is not None
    assert other.chunks == text.chunks == []
