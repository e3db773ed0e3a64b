"""A batch of one decoder's texts: the drafter of each, and its turn among all texts of the decoder."""

from __future__ import annotations

from typing import Any

from ..engine.batch import Batch, Event, NodeBudget
from ..engine.drafter import Drafter
from ..engine.request import Request
from ..engine.self_test import prove_changes
from ..engine.target import TargetModel
from .turns import Turns


class BatchInTurn:
    """Texts that share passes; to the other texts of the decoder they are one text.

    The batch has the turn while texts are under way.

    Args:
        target: the model.
        drafter: the decoder's; each text gets one like it.
        turns: of the decoder's texts.
        size: most texts under way.
        budget: divides the drafted nodes of a step among the texts; None: each drafter has its own.
        shares_memory: whether the texts learn into the drafter's memory, and from each other; else each begins
            with a copy of it, and what it learns goes with it. Of a method with a cold start each begins with none.

    Raises:
        ValueError: if the size is not allowed.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        turns: Turns,
        size: int,
        budget: NodeBudget | None,
        shares_memory: bool,
    ) -> None:
        self._batch = Batch(target, size, budget)
        self._target, self._drafter, self._turns = target, drafter, turns
        self._is_cold = drafter.needs.cold_start
        # A drafter without memory may hold weights, which siblings share.
        has_memory = drafter.keeps_memory()
        self._is_shared = not has_memory or (shares_memory and not self._is_cold)
        self._used: dict[Any, Drafter] = {}  # by the key of the text
        self._free: list[Drafter] = []  # of texts that have ended
        self._turn: object | None = None

    def __len__(self) -> int:
        """Return the number of texts under way."""
        return len(self._batch)

    @property
    def has_room(self) -> bool:
        """Whether another text may be added."""
        return self._batch.has_room

    def add(self, key: Any, request: Request) -> None:
        """Add a text; the first one waits for the decoder's text under way.

        Raises:
            ValueError: if the model was changed so that it cannot be used; as `Batch.add`.
            RuntimeError: if another text has the turn (`model.api.turns`).
        """
        self._target.check_unchanged()
        prove_changes(self._target)
        if self._turn is None:
            self._turn = self._turns.begin()
        try:
            with self._turns.stepping(self._turn):
                drafter = self._next_drafter()
                self._batch.add(key, drafter, request)
            self._used[key] = drafter
        finally:
            self._end_turn_if_empty()

    def step(self) -> list[Event]:
        """Decode a step of all texts.

        Raises:
            RuntimeError: if another text has taken the turn.
        """
        with self._turns.stepping(self._turn):
            events = self._batch.step()
        for key, record, _ in events:
            if record is None:
                del self._used[key]  # what failed is not used again
            elif record.stop_reason is not None:
                self._free.append(self._used.pop(key))
        self._end_turn_if_empty()
        return events

    def remove(self, key: Any) -> None:
        """Give up a text under way; its rows are freed.

        Raises:
            RuntimeError: if another text has taken the turn.
        """
        with self._turns.stepping(self._turn):
            self._batch.remove(key)
        self._free.append(self._used.pop(key))
        self._end_turn_if_empty()

    def close(self) -> None:
        """Give the turn back; no further step can be made. Texts under way go with the batch."""
        if self._turn is not None:
            self._turns.end(self._turn)

    def _end_turn_if_empty(self) -> None:
        if not len(self) and self._turn is not None:
            self._turns.end(self._turn)
            self._turn = None

    def _next_drafter(self) -> Drafter:
        """Return a drafter for a text to come, with the memory that it begins with."""
        mine = self._drafter
        if self._is_shared:
            return self._free.pop() if self._free else mine.sibling()
        if self._free:
            drafter = self._free.pop()
            drafter.reset()
        else:
            drafter = type(mine)(mine.config, mine.vocab_size, mine.device)
            drafter.check_target(self._target)
        if not self._is_cold and (memory := mine.memory()):
            drafter.load_memory(memory)
        return drafter
