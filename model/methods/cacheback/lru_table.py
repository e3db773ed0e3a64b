"""A table of n-grams of bounded size: for each leader the followers seen after it lately.

The leader that was written longest ago makes room for a new one, and within a leader the follower.

Shapes: E entries, n tokens of an n-gram, leader and follower.
"""

from __future__ import annotations

import torch

from ..growth.memory import check_ids, check_tensor

Tokens = tuple[int, ...]


class LruTable:
    """Followers by leader, both the oldest first.

    Args:
        leader_length, follower_length: their tokens; n together.
        most_leaders: leaders kept.
        most_followers: followers kept of each.
    """

    def __init__(
        self, leader_length: int, follower_length: int, most_leaders: int, most_followers: int
    ) -> None:
        self._leader_length = leader_length
        self._size = leader_length + follower_length
        self._most_leaders, self._most_followers = most_leaders, most_followers
        self._rows: dict[Tokens, dict[Tokens, None]] = {}

    def __len__(self) -> int:
        """Return the number of leaders."""
        return len(self._rows)

    def write(self, ngram: Tokens) -> None:
        """Write an n-gram as the newest."""
        leader, follower = ngram[: self._leader_length], ngram[self._leader_length :]
        row = self._rows.pop(leader, {})
        row.pop(follower, None)
        row[follower] = None
        if len(row) > self._most_followers:
            del row[next(iter(row))]
        self._rows[leader] = row
        if len(self._rows) > self._most_leaders:
            del self._rows[next(iter(self._rows))]

    def followers(self, leader: Tokens) -> list[Tokens]:
        """Return the followers of a leader, the newest first; none if it is not known."""
        return list(reversed(self._rows.get(leader, {})))

    def clear(self) -> None:
        self._rows.clear()

    def state(self) -> torch.Tensor:
        """Return all n-grams in an order in which they can be written again, int32 [E, n]."""
        entries = [leader + follower for leader, row in self._rows.items() for follower in row]
        return torch.tensor(entries, dtype=torch.int32).reshape(-1, self._size)

    def load_state(self, state: torch.Tensor, vocab_size: int) -> None:
        """Load a `state`, of which the newest that fit stay.

        Raises:
            ValueError: if shape, type or a token does not fit.
        """
        shape, hint = (len(state), self._size), " (leader_length, follower_length)"
        check_tensor("matrix: got", state, torch.int32, shape, hint)
        check_ids(state, vocab_size)
        self.clear()
        for entry in state.tolist():
            self.write(tuple(entry))
