"""REST: continue as a corpus did after the longest end of the text that it holds.

The last 16 tokens of the text are looked up in a datastore, then fewer, until some are found. What
followed at the places of the match makes a tree; its most frequent nodes are the draft.

Source: Z. He et al., REST: Retrieval-Based Speculative Decoding, arXiv 2311.08252 (n_max ->
`max_token_span`, c, the number of draft tokens -> `num_nodes`). Defaults and the choice of nodes are
those of the authors' code, github.com/FasterDecoding/REST (`long` -> `draft_length`, `k` ->
`max_matches`).

Shapes: M continuations, L tokens of each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...engine.budget import MAX_DRAFT, DraftBudget
from ...engine.drafter import Drafter, Needs
from ...engine.tree import DraftTree
from ...options import Options, option
from .datastore import BUILD, loaded_for

Path = tuple[int, ...]
# A span is compared at every step of a bisection; continuations are counted token by token.
MAX_SPAN, MAX_MATCHES = 1024, 1_000_000


def most_frequent(continuations: np.ndarray, most: int) -> list[Path]:
    """Return the most frequent beginnings of sorted tokens [M, L], -1 where one is over, at most `most`.

    The most frequent come first, of equals the alphabetically first: so a beginning comes after its own ones.
    """
    is_new = np.ones(continuations.shape, dtype=bool)
    # A row begins a new run of d tokens where one of its first d differs from the row before.
    is_new[1:] = np.logical_or.accumulate(continuations[1:] != continuations[:-1], axis=1)
    counts = np.zeros(continuations.shape, dtype=np.int64)
    for depth in range(continuations.shape[1]):
        begins = np.flatnonzero(is_new[:, depth])
        counts[begins, depth] = np.diff(begins, append=len(continuations))
    counts[continuations < 0] = 0
    # Row by row and from left to right is the alphabetical order.
    flat = counts.ravel()
    if np.count_nonzero(flat) > most:
        threshold = np.partition(flat, -most)[-most]
        places = np.flatnonzero(flat >= threshold)
    else:
        places = np.flatnonzero(flat)
    ranked = places[np.argsort(-flat[places], kind="stable")][:most]
    rows, depths = np.divmod(ranked, continuations.shape[1])
    return [
        tuple(continuations[row, : depth + 1].tolist())
        for row, depth in zip(rows.tolist(), depths.tolist(), strict=True)
    ]


def cut(paths: Sequence[Path], most: int) -> list[Path]:
    """Cut paths as the authors' code does: those with the most different tokens go, of equals the one ranked
    last, until all paths together have at most `most`.
    """
    left = dict.fromkeys(paths)
    total = sum(len(set(path)) for path in paths)
    for path in sorted(reversed(paths), key=lambda path: -len(set(path))):
        if total <= most:
            break
        total -= len(set(path))
        del left[path]
    return list(left)


def chain(paths: Sequence[Path]) -> list[Path]:
    """Return the path that takes the most frequent token each time."""
    taken: list[Path] = []
    for path in paths:
        if path[:-1] == (taken[-1] if taken else ()):
            taken.append(path)
    return taken


@dataclass(frozen=True, slots=True)
class RestConfig(Options):
    datastore: str | None = option(None, "file of scripts.build_datastore (required)")
    num_nodes: int = option(64, "drafted nodes of a step, at most", least=1, most=MAX_DRAFT)
    max_token_span: int = option(
        16, "longest end of the text that is looked up", least=1, most=MAX_SPAN
    )
    min_token_span: int = option(2, "shortest", least=1)
    draft_length: int = option(10, "tokens drafted one after another", least=1, most=256)
    max_matches: int = option(
        5000, "places of a match that are counted, in alphabetical order", least=1, most=MAX_MATCHES
    )
    cut: str = option(
        "published",
        "published: as the authors' code, which leaves out long paths until the lengths of all paths add "
        "up to at most --num-nodes; none: the --num-nodes most frequent nodes",
        choices=("published", "none"),
    )

    def _check(self) -> None:
        if self.min_token_span > self.max_token_span:
            raise ValueError(
                f"min_token_span: got {self.min_token_span}; allowed: at most {self.max_token_span}, "
                "the max_token_span"
            )


class RestDrafter(Drafter):
    """Drafts what followed in a datastore.

    Raises:
        ValueError: if the datastore is missing, cannot be read or is of another tokenizer.
    """

    config_class = RestConfig
    needs = Needs(reads_rejected=False)

    def __init__(self, config: RestConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        if config.datastore is None:
            raise ValueError(f"datastore: got none; give a file; {BUILD}")
        self._datastore = loaded_for(config.datastore, vocab_size)
        self.max_nodes = 1 + config.num_nodes

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        paths = self._paths(context, min(self.config.draft_length, budget.max_depth))
        if budget.chain_only:
            paths = chain(paths)
        nodes: dict[Path, int] = {(): 0}
        for path in paths:
            nodes[path] = len(nodes)
        parents = (-1, *(nodes[path[:-1]] for path in paths))
        tokens = [context[-1], *(path[-1] for path in paths)]
        return DraftTree.from_lists(tokens, parents)

    def _paths(self, context: Sequence[int], length: int) -> list[Path]:
        config, find = self.config, self._datastore.find
        least = min(config.min_token_span, len(context))
        spans = range(least, min(config.max_token_span, len(context)) + 1)
        # Where an end of the text does not occur, no longer one does.
        num_found = bisect_left(spans, True, key=lambda span: not find(context[-span:], 1))
        for span in reversed(spans[:num_found]) if length else ():
            places = find(context[-span:], config.max_matches)
            neighbours = np.arange(places.start, places.stop)
            following = self._datastore.following(neighbours, span, length)
            if paths := most_frequent(following, config.num_nodes):
                return paths if config.cut == "none" else cut(paths, config.num_nodes)
        return []

    def describe(self) -> str:
        return self._datastore.describe()
