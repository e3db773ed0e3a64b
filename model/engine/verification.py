"""Verification: which drafted nodes are accepted, and which token comes next.

Pure functions of (tree, logits, rule); no cache, no drafter. The rule makes the result lossless
whatever the tree contains: at each node choose the next token exactly as plain decoding would
(argmax, or ONE draw from the processed distribution), emit it, and descend if a child holds that
token. With one-hot drafts this is ancestral sampling itself: no accept/reject ratio and no residual
distribution.

Shapes: N nodes, V vocabulary, k candidates, S probes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch

from ..kernels.largest_logits import top_k
from .state_sketch import probed
from .tree import DraftTree, TreeTopology

# Logits count as at least this large where near-ties are looked for: the largest may be near 0, while what
# is summed up for it, and rounds, is not. The margin leaves room for sums some forty times as large.
LEAST_SIZE = 1.0


class InvalidLogitsError(ArithmeticError):
    """The model's logits hold no largest number: there is no next token to speak of."""


class Candidates(NamedTuple):
    """The likeliest next tokens after every node, on the host.

    Lists, not arrays: after a pass nothing is left in the processor's caches, so that a call into a
    library takes longer than a loop over the numbers of a usual draft.

    Attributes:
        token_ids: of N nodes k each, the likeliest first.
        logits: of these tokens.
    """

    token_ids: list[list[int]]
    logits: list[list[float]]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What one verification says, all of it on the host.

    Attributes:
        path: accepted nodes from the root (node 0) downward.
        tokens: emitted tokens: those of the accepted drafts, then the bonus token, so that
            `len(tokens) == len(path)`. Where the text ends on a drafted token there is no bonus
            token, and the path is one longer.
        node_tokens: token of every node [N], copied in the same transfer.
        predictions: the likeliest token after every node [N]; among equals any one.
        candidates: the likeliest tokens after every node, copied in the same transfer.
        probes: the probes of every node (`model.engine.state_sketch`), copied in the same transfer, float32 [N, S];
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
    probes: torch.Tensor | None = field(default=None, compare=False, repr=False)
    is_decided: bool = True
    is_stopped: bool = False

    def accepted_last(self, topology: TreeTopology) -> list[int]:
        """Return all nodes of the tree, level by level, but the accepted ones last: true successors
        overwrite what was learned from guesses.
        """
        path = self.path
        others = [node for node in range(len(self.node_tokens)) if node not in path]
        return sorted(others, key=topology.depths.__getitem__) + path

    def decided(self, token: int, is_stopped: bool = False) -> Acceptance:
        """Return this acceptance with the open token filled in."""
        return replace(self, tokens=[*self.tokens, token], is_decided=True, is_stopped=is_stopped)


class TokenRule(Protocol):
    """Chooses the token after one node when plain argmax is not the rule."""

    def choose(
        self, logits: torch.Tensor, prefix: Sequence[int], tie_margin: float = 0.0
    ) -> int | None:
        """Return the next token for `logits` [V], given the node's true prefix of token ids.

        None if rounding could exchange the two likeliest (see `verify`); the rule is then asked
        again with logits that decide.
        """
        ...


# Takes token ids [1, P] and scores [1, V] to scores [1, V], as transformers' `LogitsProcessor`.
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class GreedyRule:
    """The largest score after processors such as penalties, and forced or forbidden tokens.

    Args:
        processors: applied in order, at every node to its true prefix.
    """

    def __init__(self, processors: Sequence[Processor]) -> None:
        self.processors = tuple(processors)

    def choose(
        self, logits: torch.Tensor, prefix: Sequence[int], tie_margin: float = 0.0
    ) -> int | None:
        """Return the token with the largest score, of equals the first; None at a near-tie."""
        scores = _processed(self.processors, logits, prefix)[0]  # [V]
        if tie_margin:
            largest, *others = scores.topk(min(2, len(scores))).values.tolist()
            # A processor may leave a small score in front; the noise is that of the logits.
            gap = max(tie_gap(largest, tie_margin), tie_gap(float(logits.max()), tie_margin))
            if others and largest - others[0] < gap:
                return None
        return int(scores.argmax())


class SamplingRule:
    """One draw per emitted token from the processed distribution.

    The draws happen in the order of the emitted tokens, one each, so that plain decoding and every
    method consume one generator alike and produce the same text.

    Args:
        processors: such as transformers' temperature, top-k and top-p warpers, applied in order.
        generator: source of randomness; None uses torch's global one.
    """

    def __init__(
        self, processors: Sequence[Processor], generator: torch.Generator | None = None
    ) -> None:
        self.processors = tuple(processors)
        self.generator = generator

    def choose(self, logits: torch.Tensor, prefix: Sequence[int], tie_margin: float = 0.0) -> int:
        """Return one draw; where tokens are drawn there is no tie."""
        scores = _processed(self.processors, logits, prefix)
        return int(torch.multinomial(scores.softmax(dim=-1), 1, generator=self.generator))


@contextmanager
def as_in_transformers() -> Iterator[None]:
    """Run the user's code in the block as transformers' own generation does: what was made in inference mode
    could neither be written nor be part of a gradient later.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


def _processed(
    processors: Sequence[Processor], logits: torch.Tensor, prefix: Sequence[int]
) -> torch.Tensor:
    """Return the scores [1, V] after all processors; float32 as in transformers' own generation."""
    with as_in_transformers():
        scores = logits[None].to(dtype=torch.float32, copy=True)
        input_ids = torch.tensor([list(prefix)], device=logits.device)  # [1, P]
        for processor in processors:
            scores = processor(input_ids, scores)
    return scores


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
    with_probes: bool = False,
) -> Acceptance:
    """Accept the longest path whose tokens the target model would have emitted.

    Nothing is drawn past the end of the text, so that a shared generator stays in step with plain
    decoding.

    Args:
        tree: the verified draft, N nodes.
        logits: the target model's logits after every node, [N, V].
        rule: None for greedy decoding, else the rule that chooses each token.
        prefix: committed token ids up to and including the root; only read by `rule` and `stop`.
        eos_ids: token ids that end the text.
        max_tokens: most tokens to emit; None sets no limit.
        tie_margin: greedy decoding stops, undecided, at a node whose two largest logits differ by
            less than this share of the largest (`tie_gap`); 0 decides always.
        num_candidates: candidates k that the drafter wants after every node.
        stop: asked after every emitted token, with the whole text, whether the text ends there.
        with_probes: whether the drafter wants the probes of every node.

    Returns:
        The acceptance. Siblings may repeat a token: all of them are followed, the longest path
        wins, and among equals the one that branches off first.

    Raises:
        InvalidLogitsError: if the largest logit of a node on the path is not a finite number.
    """
    # The two largest, where their distance says whether rounding could exchange them.
    num_read = max(num_candidates, 2 if tie_margin else 1)
    node_tokens, candidates, probes = read_out(tree, logits, num_read, with_probes)
    predictions = [token_ids[0] for token_ids in candidates.token_ids]
    children = tree.topology.children
    frontier = [0]  # nodes with the same, accepted, path of tokens
    emitted: list[int] = []
    while True:
        node = frontier[0]
        largest, *others = candidates.logits[node][:2]
        check_finite(largest)
        token: int | None
        if rule is not None:
            token = rule.choose(logits[node], [*prefix, *emitted], tie_margin)
        elif others and largest - others[0] < tie_gap(largest, tie_margin):
            token = None
        elif others and largest == others[0]:
            token = int(logits[node].argmax())  # the first among equals, as plain decoding takes
        else:
            token = predictions[node]
        if token is None:
            path = tree.topology.path_to(node)
            return Acceptance(
                path, emitted, node_tokens, predictions, candidates, probes, is_decided=False
            )
        emitted.append(token)
        is_stopped = stop is not None and stop([*prefix, *emitted])
        matching = [
            child
            for parent in frontier
            for child in children[parent]
            if node_tokens[child] == token
        ]
        if not matching or token in eos_ids or is_stopped or len(emitted) == max_tokens:
            path = tree.topology.path_to(matching[0] if matching else node)
            return Acceptance(
                path, emitted, node_tokens, predictions, candidates, probes, is_stopped=is_stopped
            )
        frontier = matching


def decides_near_ties(dtype: torch.dtype) -> bool:
    """Whether near-ties of logits of this dtype are left to plain decoding.

    Not in half precision: its noise is as large as common differences, so that most of the text would
    be decoded twice.
    """
    return dtype.itemsize >= 4


def tie_gap(largest: float, margin: float) -> float:
    """Return the difference from the largest logit below which rounding could exchange two."""
    return margin * max(abs(largest), LEAST_SIZE)


def check_finite(largest: float) -> None:
    """Raise InvalidLogitsError if the largest logit of a node is not a finite number."""
    if not math.isfinite(largest):
        raise InvalidLogitsError(f"the largest logit is {largest}; allowed: a finite number")


def read_out(
    tree: DraftTree, logits: torch.Tensor, num_candidates: int, with_probes: bool = False
) -> tuple[list[int], Candidates, torch.Tensor | None]:
    """Copy the tokens [N] of a tree, and the candidates and probes of each, to the host, in one transfer.

    Args:
        tree: N nodes.
        logits: [N, V].
        num_candidates: k; of 1, equal logits go to the first token, else to any of them.
        with_probes: whether probes are wanted.

    Returns:
        Tokens, candidates of N nodes, and their probes, float32 [N, S], None if there are none.
    """
    count = min(num_candidates, logits.shape[-1])
    if count == 1:
        values, token_ids = logits.max(dim=-1, keepdim=True)  # [N, 1], [N, 1]
    else:
        values, token_ids = top_k(logits, count)  # [N, k], [N, k]
    probes = probed(logits) if with_probes else None
    if logits.device.type == "cpu":  # nothing to transfer
        found = Candidates(token_ids.tolist(), values.tolist())
        return tree.token_ids.tolist(), found, probes
    return _unpacked(_packed(tree, token_ids, values, probes).cpu(), count)


def _packed(
    tree: DraftTree,
    token_ids: torch.Tensor,
    values: torch.Tensor,
    probes: torch.Tensor | None,
) -> torch.Tensor:
    """Return tokens [N], candidates and their logits [N, k] and probes [N, S] as one int32 tensor."""
    numbers = values.float() if probes is None else torch.cat((values.float(), probes), dim=1)
    tokens = tree.token_ids[:, None].int()
    return torch.cat((tokens, token_ids.int(), numbers.view(torch.int32)), dim=1)


def _unpacked(
    packed: torch.Tensor, num_candidates: int
) -> tuple[list[int], Candidates, torch.Tensor | None]:
    """Return what `read_out` returns, of what `_packed` returned."""
    tokens, token_ids, bits = packed.tensor_split((1, 1 + num_candidates), dim=1)
    values, probes = bits.view(torch.float32).tensor_split((num_candidates,), dim=1)
    found = Candidates(token_ids.tolist(), values.tolist())
    return tokens[:, 0].tolist(), found, probes if probes.shape[1] else None
