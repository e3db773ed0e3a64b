"""Policy "original" accepts what the published algorithm accepts, question after question.

The reference below is slow and obvious: lists, no cache, one plain pass for every node. It
overshoots the limit as the published loop does, so that acceptance lengths are compared up to our
cut.

Run: pytest tests/model/methods/recycling/test_original_policy.py
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from model.backends.target import TargetModel
from model.engine.loop import generate
from model.methods.recycling.drafter import load_template
from tests.model.decoded import drafter_for, random_ids
from tests.model.families.family import Family

K = 8
VOCAB = 24  # small, so that rows are overwritten often
TEMPLATE = "2.2.2"


class Published:
    """The published algorithm on plain forward passes."""

    def __init__(self, target: TargetModel) -> None:
        self.target = target
        self.matrix = [[0] * K for _ in range(VOCAB)]
        self.paths = [(), *load_template(TEMPLATE).paths]
        self._known: dict[tuple[int, ...], list[int]] = {}

    def answer(self, prompt: list[int], limit: int, eos_id: int) -> list[int]:
        """Return the acceptance lengths of one question; the matrix goes on to the next."""
        text, lengths = list(prompt), []
        num_new = 0
        while True:
            tokens = self.filled_tree(text[-1])
            best = [self.best_tokens(text, path, tokens) for path in self.paths]
            accepted = self.longest(tokens, best)
            drafted = [tokens[path] for path in accepted]
            bonus = best[self.paths.index(accepted[-1])][0]
            lengths.append(len(accepted))
            text += [*drafted[1:], bonus]
            num_new += len(accepted)
            if eos_id in drafted or num_new - 1 > limit:
                return lengths
            for path, row in zip(self.paths, best, strict=True):
                self.matrix[tokens[path]] = row
            if bonus == eos_id:
                return lengths

    def filled_tree(self, root: int) -> dict[tuple[int, ...], int]:
        """Return the token of every path of ranks."""
        tokens = {(): root}
        for path in self.paths[1:]:
            tokens[path] = self.matrix[tokens[path[:-1]]][path[-1]]
        return tokens

    def best_tokens(
        self, text: list[int], path: tuple[int, ...], tokens: dict[tuple[int, ...], int]
    ) -> list[int]:
        """Return the K best tokens after a node."""
        node_text = (*text, *(tokens[path[: size + 1]] for size in range(len(path))))
        if node_text not in self._known:
            logits = self.target.model(torch.tensor([node_text]), use_cache=False).logits[0, -1]
            self._known[node_text] = logits.topk(K).indices.tolist()
        return self._known[node_text]

    def longest(
        self, tokens: dict[tuple[int, ...], int], best: Sequence[list[int]]
    ) -> list[tuple[int, ...]]:
        """Return the nodes of the longest path whose tokens are all the best ones."""
        found: list[tuple[int, ...]] = [()]
        for path in self.paths:
            nodes = [path[:size] for size in range(len(path) + 1)]
            is_right = all(
                tokens[child] == best[self.paths.index(parent)][0]
                for parent, child in pairwise(nodes)
            )
            if is_right and len(nodes) > len(found):
                found = nodes
        return found


def cut(lengths: list[int], limit: int) -> list[int]:
    """Return acceptance lengths as far as `limit` tokens."""
    shown: list[int] = []
    for length in lengths:
        room = limit - sum(shown)
        if room <= 0:
            break
        shown.append(min(length, room))
    return shown


def cut_at_end(lengths: list[int], emitted: list[int], eos_id: int) -> list[int]:
    """Return acceptance lengths as far as the end token, if it was emitted."""
    return cut(lengths, emitted.index(eos_id) + 1) if eos_id in emitted else lengths


@pytest.fixture(scope="module")
def target() -> TargetModel:
    """A model with a small vocabulary."""
    return TargetModel(Family("small", "LlamaConfig", {"vocab_size": VOCAB}).build(seed=1))


@torch.inference_mode()
@pytest.mark.parametrize("limit", [1, 5, 12])
@pytest.mark.parametrize("eos_id", [7, 19, 23])
def test_acceptance_lengths_equal_the_published_algorithm(
    target: TargetModel, limit: int, eos_id: int
) -> None:
    published = Published(target)
    recycling = drafter_for("recycling", target, policy="original")
    for question in range(6):
        prompt = [
            token
            for token in random_ids(9 + question, seed=question, vocab_size=VOCAB)
            if token != eos_id
        ]
        answer = generate(target, recycling, prompt, max_new_tokens=limit, eos_ids=[eos_id])
        lengths = published.answer(prompt, limit, eos_id)
        expected = cut_at_end(cut(lengths, limit), answer.token_ids, eos_id)
        assert answer.accept_lengths == expected, f"question {question}"
        assert recycling.memory()["adjacency"].tolist() == published.matrix, (
            f"the matrix differs after question {question}, which ended "
            f"{answer.steps[-1].stop_reason} with {answer.token_ids}"
        )
