"""Verification: which drafted nodes are accepted, and which token comes next.

Pure functions of (tree, logits, rule); no cache, no drafter. The rule makes the result lossless
whatever the tree contains: at each node choose the next token exactly as plain decoding would
(argmax, or ONE draw from the processed distribution), emit it, and descend if a child holds that
token. With one-hot drafts this is ancestral sampling itself: no accept/reject ratio and no residual
distribution.

Shapes: N nodes, V vocabulary, k candidates, S sketches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from .read_out import Candidates, Reader, read_out
from .rules import TokenRule, tie_gap
from .tree import DraftTree, TreeTopology


class InvalidLogitsError(ArithmeticError):
    """The largest logit is not a finite number, so there is no next token."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The result of one verification, all on the host.

    Attributes:
        path: accepted nodes from the root (node 0) downward.
        tokens: emitted tokens: those of the accepted drafts, then the bonus token, so that
            `len(tokens) == len(path)`. Where the text ends on a drafted token there is no bonus
            token, and the path is one longer.
        node_tokens: token of every node [N], copied in the same transfer.
        predictions: the likeliest token after every node [N]; among equals any one.
        candidates: the likeliest tokens after every node, copied in the same transfer.
        sketches: the sketches of every node (`read_out`), copied in the same transfer, float32 [N, S];
            None if the drafter wants none.
        is_decided: False where the walk stopped at a near-tie: `path` ends at the node whose next
            token is open, and `tokens` lacks that token.
        is_stopped: whether a stopping criterion ends the text after the last token.
    """

    path: list[int]
    tokens: list[int]
    node_tokens: list[int]
    predictions: list[int]
    candidates: Candidates = field(compare=False, repr=False)
    sketches: torch.Tensor | None = field(default=None, compare=False, repr=False)
    is_decided: bool = True
    is_stopped: bool = False

    def accepted_last(self, topology: TreeTopology) -> list[int]:
        """Return all nodes level by level, the accepted ones last, so that true successors overwrite guesses."""
        path = self.path
        others = [node for node in range(len(self.node_tokens)) if node not in path]
        return sorted(others, key=topology.depths.__getitem__) + path

    def decided(self, token: int, is_stopped: bool = False) -> Acceptance:
        """Return this acceptance with the open token filled in."""
        return replace(self, tokens=[*self.tokens, token], is_decided=True, is_stopped=is_stopped)


def verify(
    tree: DraftTree,
    logits: torch.Tensor,
    rule: TokenRule | None = None,
    prefix: Sequence[int] = (),
    eos_ids: Collection[int] = (),
    max_tokens: int | None = None,
    tie_margin: float = 0.0,
    num_candidates: int = 0,
    stop: Callable[[Sequence[int]], bool] | None = None,
    with_sketches: bool = False,
    read: Reader = read_out,
) -> Acceptance:
    """Accept the longest path whose tokens the target model would have emitted.

    Nothing is drawn past the end of the text, so that a shared generator stays in step with plain
    decoding. Siblings may repeat a token: all of them are followed, the longest path wins, and among
    equals the one that branches off first.

    Args:
        tree: the verified draft, N nodes.
        logits: the target model's logits after every node, [N, V].
        rule: None for greedy decoding, else the rule that chooses each token.
        prefix: committed token ids up to and including the root; only read by `rule` and `stop`.
        eos_ids: token ids that end the text.
        max_tokens: most tokens to emit; None sets no limit.
        tie_margin: two largest logits that differ by less than this share of the larger (`tie_gap`) are
            left undecided; 0 decides always.
        num_candidates: candidates k that the drafter wants after every node.
        stop: asked after every emitted token, with the whole text, whether the text ends there.
        with_sketches: whether the drafter wants the sketches of every node.
        read: copies to the host what is read of the pass, as `read_out`.

    Raises:
        InvalidLogitsError: if the largest logit of a node on the path is not a finite number.
    """
    # Near-ties need the two largest logits.
    num_read = max(num_candidates, 2 if tie_margin else 1)
    node_tokens, candidates, sketches = read(tree, logits, num_read, with_sketches)

    def choose(node: int, emitted: list[int]) -> int | None:
        check_finite(candidates.logits[node][0])
        if rule is not None:
            return rule.choose(logits[node], [*prefix, *emitted], tie_margin)
        return _likeliest(candidates, node, logits, tie_margin)

    def ends(emitted: list[int]) -> bool:
        return stop is not None and stop([*prefix, *emitted])

    path, tokens, *ending = accepted_walk(
        tree.topology, node_tokens, choose, eos_ids, max_tokens, ends
    )
    predictions = [ids[0] for ids in candidates.token_ids]
    return Acceptance(path, tokens, node_tokens, predictions, candidates, sketches, *ending)


class Walk(NamedTuple):
    """An accepted path from the root, and what was emitted along it; fields as of `Acceptance`."""

    path: list[int]
    tokens: list[int]
    is_decided: bool = True
    is_stopped: bool = False


def accepted_walk(
    topology: TreeTopology,
    node_tokens: Sequence[int],
    choose: Callable[[int, list[int]], int | None],
    eos_ids: Collection[int] = (),
    max_tokens: int | None = None,
    ends: Callable[[list[int]], bool] = lambda emitted: False,
) -> Walk:
    """Walk from the root down, as far as the drafted tokens are those that the model chooses.

    Args:
        topology: of the draft, N nodes.
        node_tokens: token of every node [N].
        choose: returns the token after a node, given the tokens emitted before it; None if it is open.
        eos_ids: token ids that end the text.
        max_tokens: most tokens to emit; None sets no limit.
        ends: whether a stopping criterion ends the text after the tokens emitted so far.
    """
    emitted: list[int] = []
    frontier = [0]  # nodes with the same, accepted, path of tokens
    while True:
        node = frontier[0]
        token = choose(node, emitted)
        if token is None:
            return Walk(topology.path_to(node), emitted, is_decided=False)
        emitted.append(token)
        is_stopped = ends(emitted)
        children = [child for parent in frontier for child in topology.children[parent]]
        matching = [child for child in children if node_tokens[child] == token]
        if not matching or token in eos_ids or is_stopped or len(emitted) == max_tokens:
            path = topology.path_to(matching[0] if matching else node)
            return Walk(path, emitted, is_stopped=is_stopped)
        frontier = matching


def _likeliest(
    candidates: Candidates, node: int, logits: torch.Tensor, tie_margin: float
) -> int | None:
    """Return the likeliest token after a node, of equals the first as in plain decoding; None at a near-tie."""
    largest, *others = candidates.logits[node][:2]
    if others and largest - others[0] < tie_gap(largest, tie_margin):
        return None
    if others and largest == others[0]:
        return int(logits[node].argmax())
    return candidates.token_ids[node][0]


def check_finite(largest: float) -> None:
    """Raise InvalidLogitsError if the largest logit of a node is not a finite number."""
    if not math.isfinite(largest):
        raise InvalidLogitsError(f"the largest logit is {largest}; allowed: a finite number")
