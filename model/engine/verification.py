"""Verification: which drafted nodes are accepted, and which token comes next.

`verify` is a pure function of (tree, logits, rule): no cache, no drafter. Its rule makes the result lossless
whatever the tree contains: at each node choose the next token exactly as plain decoding would
(argmax, or ONE draw from the processed distribution), emit it, and descend if a child holds that
token. With one-hot drafts this is ancestral sampling itself: no accept/reject ratio and no residual
distribution. Children that were drawn, too, are accepted by the ratio of probabilities (`model.engine.draws`).

Shapes: N nodes, V vocabulary, k candidates, S logit samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from .backend import Backend, Rows
from .draws import DrawnNodes
from .read_out import Candidates, Reader, read_out, tie_gap
from .rules import SamplingRule, TokenRule
from .tree import DraftTree, TreeTopology


class InvalidLogitsError(ArithmeticError):
    """The largest logit is not a finite number, so there is no next token."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The result of one verification, all on the host.

    Attributes:
        path: accepted nodes from the root (node 0) downward.
        tokens: emitted tokens: those of the accepted drafts, then the bonus token, so that
            `len(tokens) == len(path)`. Where the sequence ends on a drafted token there is no bonus
            token, and the path is one longer.
        node_tokens: token of every node [N], copied in the same transfer.
        predictions: the likeliest token after every node [N]; among equals any one.
        candidates: the likeliest tokens after every node, copied in the same transfer.
        logit_samples: those of every node (`read_out`), copied in the same transfer, float32 [N, S];
            None if the drafter wants none.
        is_decided: False where the walk stopped at a near-tie: `path` ends at the node whose next
            token is open, and `tokens` lacks that token.
        is_stopped: whether a stopping criterion ends the sequence after the last token.
    """

    path: list[int]
    tokens: list[int]
    node_tokens: list[int]
    predictions: list[int]
    candidates: Candidates = field(compare=False, repr=False)
    logit_samples: torch.Tensor | None = field(default=None, compare=False, repr=False)
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
    with_samples: bool = False,
    read: Reader = read_out,
) -> Acceptance:
    """Accept the longest path whose tokens the target model would have emitted.

    Nothing is drawn past the end of the sequence, so that a shared generator stays in step with plain
    decoding. Siblings may repeat a token: all of them are followed, the longest path wins, and among
    equals the one that branches off first.

    Args:
        tree: the verified draft, N nodes.
        logits: the target model's logits after every node, [N, V].
        rule: None for greedy decoding, else the rule that chooses each token.
        prefix: committed token ids up to and including the root; only read by `rule` and `stop`.
        eos_ids: token ids that end the sequence.
        max_tokens: most tokens to emit; None sets no limit.
        tie_margin: two largest logits that differ by less than this share of the larger (`tie_gap`) are
            left undecided; 0 decides always.
        num_candidates: candidates k that the drafter wants after every node.
        stop: asked after every emitted token, with the whole sequence, whether the sequence ends there.
        with_samples: whether the drafter wants the logit samples of every node.
        read: copies to the host what is read of the pass, as `read_out`.

    Raises:
        InvalidLogitsError: if the largest logit of a node on the path is not a finite number.
    """
    # Near-ties need the two largest logits.
    num_read = max(num_candidates, 2 if tie_margin else 1)
    node_tokens, candidates, logit_samples, gaps = read(tree, logits, num_read, with_samples)

    drawn = None
    if tree.drawn is not None and isinstance(rule, SamplingRule):
        for row in candidates.logits:
            check_finite(row[0])
        drawn = DrawnNodes(tree.drawn, tree.topology, node_tokens, logits, rule, prefix)

    def choose(node: int, emitted: list[int]) -> int | None:
        check_finite(candidates.logits[node][0])
        if drawn is not None and (token := drawn.choose(node, emitted)) is not None:
            return token
        if rule is not None:
            return rule.choose(logits[node], [*prefix, *emitted], tie_margin)
        if gaps[node] < tie_gap(candidates.logits[node][0], tie_margin):
            return None
        # Of equals the first as in plain decoding.
        return candidates.token_ids[node][0] if gaps[node] else int(logits[node].argmax())

    def ends(emitted: list[int]) -> bool:
        return stop is not None and stop([*prefix, *emitted])

    path, tokens, *ending = accepted_walk(
        tree.topology, node_tokens, choose, eos_ids, max_tokens, ends
    )
    predictions = [ids[0] for ids in candidates.token_ids]
    return Acceptance(path, tokens, node_tokens, predictions, candidates, logit_samples, *ending)


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
        eos_ids: token ids that end the sequence.
        max_tokens: most tokens to emit; None sets no limit.
        ends: whether a stopping criterion ends the sequence after the tokens emitted so far.
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


def check_finite(largest: float) -> None:
    """Raise InvalidLogitsError if the largest logit of a node is not a finite number."""
    if not math.isfinite(largest):
        raise InvalidLogitsError(f"the largest logit is {largest}; allowed: a finite number")


class ReferenceRows:
    """Decides near-ties by plain decoding; counts the first rows of a sequence's cache that equal its own bit for
    bit.

    A token that rounding could exchange is computed again as plain decoding computes it: the rows that
    were read in another way are read again, in the same shapes as there. `margin` is the backend's `tie_margin`.
    """

    def __init__(self, target: Backend, cache: Rows, prompt_length: int) -> None:
        self._target, self._cache, self._prompt_length = target, cache, prompt_length
        self._num_rows = 0
        self._is_reference = False  # whether the step under way is plain decoding itself
        self.margin = target.tie_margin

    def read_prompt(self, num_tokens: int) -> None:
        """Take note of a chunk of the prompt that was read."""
        is_first = self._num_rows == self._cache.length - num_tokens  # or all before it are
        is_reference = is_first and self._target.is_reference(num_tokens)
        self._num_rows = self._cache.length if is_reference else 0

    def margin_of(self, tree: DraftTree, base: int, is_plain: bool = True) -> float:
        """Return the margin for the step to come, after `base` rows: 0 where it is plain decoding itself.

        Its pass `is_plain` if it is that of the loop of one sequence.
        """
        is_root = is_plain and tree.topology.num_nodes == 1
        self._is_reference = (
            is_root and self._num_rows == base and self._target.is_reference(num_rows=1)
        )
        if self._is_reference:
            return 0.0
        if self._num_rows == base:
            self._cache.mark()
        return self.margin

    def with_token_decided(
        self,
        acceptance: Acceptance,
        sequence: Sequence[int],  # before the step
        rule: TokenRule | None,
        stop: Callable[[Sequence[int]], bool] | None,
    ) -> Acceptance:
        """Return the last step's acceptance with its open token decided, if it has one, once its rows are kept."""
        if not acceptance.is_decided:
            sequence = [*sequence, *acceptance.tokens]
            token = self._reference_token(sequence, rule)
            acceptance = acceptance.decided(token, stop is not None and stop([*sequence, token]))
            self._is_reference = True
        if self._is_reference:
            self._num_rows = self._cache.length
        self._is_reference = False
        return acceptance

    def _reference_token(self, sequence: Sequence[int], rule: TokenRule | None) -> int:
        """Return the token that plain decoding puts after `sequence`, to the last bit.

        The other rows are computed again, those of new tokens one at a time, as plain decoding does: the
        same shapes round alike. Rare enough to cost nothing that can be measured.
        """
        target, cache = self._target, self._cache
        cache.keep(self._num_rows, ())
        with target.reference():
            for _ in target.prefill(sequence[: self._prompt_length], cache, with_logits=False):
                pass  # nothing is left of the prompt where its rows are plain decoding's
            for token in sequence[cache.length :]:
                logits = target.forward(DraftTree.chain([token]), cache)
        chosen = None if rule is None else rule.choose(logits[-1], sequence)
        return int(logits[-1].argmax()) if chosen is None else chosen
