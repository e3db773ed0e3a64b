"""Cacheback: nothing but a table of n-grams drafts, and the least recently used ones make room.

An n-gram of the text is a leader and the tokens after it, a follower. The followers of the text's end are drafted,
the newest first, then those of each follower's end, and so on, level by level, until the draft is full. A
second, frozen table answers beside the first: that of the text begins empty.

Source: Z. Ma, I. Gim and L. Zhong, Cacheback: Speculative Decoding With Nothing But Cache, EMNLP 2025, arXiv
2511.21699 (LL -> `leader_length`, FL -> `follower_length`, LC -> `leaders`, FC -> `followers`).

Shapes: E entries, n tokens of an n-gram, leader and follower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...budget.memory import check_ids, check_names, check_size, check_tensor
from ...engine.budget import MAX_DRAFT, DraftBudget
from ...engine.drafter import Drafter, Needs, VerifiedStep
from ...engine.tree import DraftTree
from ...options import Options, option, start_option

Tokens = tuple[int, ...]
NGRAMS = "ngrams"


class LruTable:
    """Followers by leader, both the oldest first; leader and follower have n tokens together."""

    def __init__(self, config: CachebackConfig) -> None:
        self._leader_length = config.leader_length
        self._size = config.leader_length + config.follower_length
        self._most_leaders, self._most_followers = config.leaders, config.followers
        self._rows: dict[Tokens, dict[Tokens, None]] = {}

    def __len__(self) -> int:
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
        """Load a `state`, of which the newest that fit stay, or raise ValueError."""
        shape, hint = (len(state), self._size), " (leader_length, follower_length)"
        check_tensor("matrix: got", state, torch.int32, shape, hint)
        check_ids(state, vocab_size)
        self.clear()
        for entry in state.tolist():
            self.write(tuple(entry))


@dataclass(frozen=True, slots=True)
class CachebackConfig(Options):
    num_nodes: int = option(63, "drafted nodes of a step, at most", least=1, most=MAX_DRAFT)
    leader_length: int = option(1, "tokens of the text's end that are looked up", least=1, most=16)
    follower_length: int = option(3, "tokens kept after a leader", least=1, most=16)
    leaders: int = option(256, "leaders kept; the least recently written one is replaced", least=1)
    followers: int = option(4, "followers kept of each leader", least=1)
    frozen: str | None = option(
        None,
        "a second table, which does not change: a file that --save-matrix of this method wrote",
    )
    start: str = start_option("the table lives")

    def _check(self) -> None:
        ngrams = self.leaders * self.followers
        check_size("leaders, followers", ngrams, self.leader_length + self.follower_length)


class CachebackDrafter(Drafter):
    config_class = CachebackConfig

    def __init__(self, config: CachebackConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        self.max_nodes = 1 + config.num_nodes
        self.needs = Needs(reads_rejected=False, cold_start=config.start == "cold")
        self._table = LruTable(config)
        self._frozen = self._frozen_table(config.frozen) if config.frozen else None
        self._end: Tokens = ()  # the text's last tokens, one less than an n-gram has

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._end = ()
        self._extend(prompt_ids)

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Return the tree of followers of followers; where only a chain is allowed, of the newest ones."""
        config = self.config
        tokens, parents, children = [context[-1]], [-1], dict[tuple[int, int], int]()
        # Node, depth, the text's end there.
        queue = [(0, 0, tuple(context[-config.leader_length :]))]
        reached = {0}
        for node, depth, end in queue:  # grows meanwhile
            followers = self._followers(end)
            for follower in followers[:1] if budget.chain_only else followers:
                last = node
                for token in follower[: budget.max_depth - depth]:
                    if (last, token) not in children:
                        if len(tokens) == self.max_nodes:
                            return DraftTree.from_lists(tokens, tuple(parents))
                        children[last, token] = len(tokens)
                        tokens.append(token)
                        parents.append(last)
                    last = children[last, token]
                below = depth + len(follower)
                if last not in reached and below < budget.max_depth:
                    reached.add(last)
                    queue.append((last, below, (*end, *follower)[-config.leader_length :]))
        return DraftTree.from_lists(tokens, tuple(parents))

    def observe(self, step: VerifiedStep) -> None:
        self._extend(step.acceptance.tokens)

    def skip(self, tokens: Sequence[int]) -> None:
        self._extend(tokens)

    def reset(self) -> None:
        self._table.clear()

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the n-grams of the table, int32 [E, n]; not the frozen ones."""
        return {NGRAMS: self._table.state()}

    def load_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._load(self._table, tensors)

    def describe(self) -> str:
        frozen = "" if self._frozen is None else f", {len(self._frozen)} frozen"
        return f"table of {len(self._table)} of {self.config.leaders} leaders{frozen}"

    def _frozen_table(self, file: str) -> LruTable:
        """Return the table of a file, or raise ValueError if it is not a saved table that fits this drafter."""
        try:
            tensors = load_file(file)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"frozen {file}: cannot be read: {error}") from error
        table = LruTable(self.config)
        try:
            self._load(table, tensors)
        except ValueError as error:
            raise ValueError(f"frozen {file}: {error}") from error
        return table

    def _load(self, table: LruTable, tensors: Mapping[str, torch.Tensor]) -> None:
        check_names(tensors, self.memory())
        table.load_state(tensors[NGRAMS], self.vocab_size)

    def _followers(self, leader: Tokens) -> list[Tokens]:
        found = self._table.followers(leader)
        if self._frozen is None:
            return found
        return list(dict.fromkeys((*found, *self._frozen.followers(leader))))

    def _extend(self, tokens: Sequence[int]) -> None:
        """Append new tokens of the text, and write all n-grams that they complete."""
        size = self.config.leader_length + self.config.follower_length
        text = (*self._end, *tokens)
        for end in range(size, len(text) + 1):
            ngram = text[end - size : end]
            if max(ngram) < self.vocab_size:  # some prompts' tokens have no logit
                self._table.write(ngram)
        self._end = text[1 - size :]
