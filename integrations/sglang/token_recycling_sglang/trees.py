"""Draft trees from the adjacency matrix, and what the verified logits teach it.

It takes the place of SGLang's n-gram corpus: it is asked for trees and told that texts grew by the
same calls (`sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus`, 0.5.23). In addition it is
shown the logits of every node, rejected ones included (arXiv 2408.08696, section 3.2).

Shapes: B requests, N nodes of a tree, the root included, k successors in a row, V vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch
from token_recycling_vllm.row_tables import averaged

# What a node is taken to be worth where the matrix knows nothing after its parent.
UNKNOWN = 1e-6


class RecycledTrees:
    """Grows, for each request, the tree of the N likeliest nodes after its last token."""

    def __init__(self, vocab_size: int, k: int, num_nodes: int) -> None:
        self._vocab_size, self._k, self._num_nodes = vocab_size, k, num_nodes
        self.reset()

    def reset(self) -> None:
        shape = (self._vocab_size, self._k)
        self._successors = np.zeros(shape, dtype=np.int32)
        self._shares = np.zeros(shape, dtype=np.float32)  # 0: no row yet
        self._tokens: np.ndarray | None = None  # of the trees handed out last
        self._parents: list[list[int]] = []
        # Of these, once they are verified, still on the device: the likeliest tokens after every node and their
        # shares [B * N, k], the emitted tokens, N places for each request [B * N], and how many these are [B].
        self._verified: tuple[torch.Tensor, ...] | None = None

    def batch_get(
        self,
        req_ids: Sequence[str],
        batch_tokens: Sequence[Sequence[int]],
        total_lens: Sequence[int],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of all trees, int64 [B * N], and which nodes each node sees, bool [B * N * N].

        Of these only `batch_tokens` are used, the last tokens of each text.
        """
        trees = [self._grow(int(tokens[-1])) for tokens in batch_tokens]
        self._tokens = np.array([tokens for tokens, _ in trees], dtype=np.int64).reshape(-1)
        self._parents = [parents for _, parents in trees]
        masks = np.zeros((len(trees), self._num_nodes, self._num_nodes), dtype=bool)
        for mask, parents in zip(masks, self._parents, strict=True):
            for node, parent in enumerate(parents):
                if parent >= 0:
                    mask[node] = mask[parent]
                mask[node, node] = True
        return self._tokens.copy(), masks.reshape(-1)

    def observe(
        self, logits: torch.Tensor, emitted: torch.Tensor, num_emitted: torch.Tensor
    ) -> None:
        """Note the logits of the trees handed out last; their rows are written before the next ones.

        Nothing is waited for: the likeliest tokens are chosen on the device.

        Args:
            logits: after every node, [B * N, V].
            emitted: tokens of each request, N places each, [B * N].
            num_emitted: how many of these are tokens, [B].
        """
        if self._tokens is None or len(logits) != len(self._tokens):
            return
        values, ids = logits.topk(self._k, dim=-1)
        self._verified = ids.int(), values.float().softmax(dim=-1), emitted, num_emitted

    def synchronize(self) -> None:
        """Write the rows of the verified trees, those of emitted tokens last."""
        if self._tokens is None or self._verified is None:
            return
        successors, shares, emitted, counts = (part.cpu().numpy() for part in self._verified)
        self._verified = None
        tokens = self._tokens.reshape(-1, self._num_nodes)
        emitted = emitted.reshape(len(tokens), -1)
        is_on_path = np.zeros(tokens.shape, dtype=bool)
        for index, parents in enumerate(self._parents):
            path = _path(tokens[index], parents, emitted[index, : counts[index]].tolist())
            is_on_path[index, path] = True
        # The last of equal tokens is written, and a row is half the old and half the new one.
        order = np.argsort(is_on_path.reshape(-1), kind="stable")[::-1]
        written, places = np.unique(self._tokens[order], return_index=True)
        places, written = order[places], written[written < self._vocab_size]
        places = places[: len(written)]
        self._successors[written], self._shares[written] = averaged(
            self._successors[written], self._shares[written], successors[places], shares[places]
        )

    def batch_put(self, batch_tokens: Sequence[Sequence[int]]) -> None:
        """Do nothing: the texts themselves teach no row."""

    def erase_match_state(self, req_ids: Sequence[str]) -> None:
        """Do nothing: requests have no state."""

    def _grow(self, root: int) -> tuple[list[int], list[int]]:
        """Return the tokens and parents of the N likeliest nodes, parents before children."""
        tokens, parents = [root], [-1]
        heap: list[tuple[float, int, int, int]] = []  # minus probability, order, parent, token
        self._push(heap, root, 0, 1.0)
        while len(tokens) < self._num_nodes:
            minus, _, parent, token = heapq.heappop(heap)
            tokens.append(token)
            parents.append(parent)
            self._push(heap, token, len(tokens) - 1, -minus)
        return tokens, parents

    def _push(
        self, heap: list[tuple[float, int, int, int]], token: int, node: int, probability: float
    ) -> None:
        """Add the successors of a node; of an unknown one, as many different tokens as a row has."""
        is_known = token < self._vocab_size and self._shares[token, 0] > 0
        ids = self._successors[token].tolist() if is_known else range(self._k)
        values = self._shares[token].tolist() if is_known else [UNKNOWN] * self._k
        for rank, (successor, share) in enumerate(zip(ids, values, strict=True)):
            heapq.heappush(
                heap, (-probability * share, len(heap) * self._k + rank, node, successor)
            )


def _path(tokens: np.ndarray, parents: list[int], emitted: list[int]) -> list[int]:
    """Return the root and the nodes whose tokens were emitted."""
    path = [0]
    for token in emitted[:-1]:
        for node in range(path[-1] + 1, len(parents)):
            if parents[node] == path[-1] and tokens[node] == token:
                path.append(node)
                break
        else:
            break
    return path
