"""Drafts that were drawn: which of them a text that is drawn accepts, so that it keeps its distribution.

A guess is accepted where the model's own draw hits it. A child that was drawn from a known distribution is accepted
by the ratio of probabilities, which is more often; a chain of them is judged as a whole.

Shapes: N nodes, V vocabulary, n drawn tokens of a chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .rules import SamplingRule
from .tree import Drawn, TreeTopology


class DrawnNodes:
    """The tokens after the nodes of a draft whose children were drawn.

    Args:
        drawn: by node, from what its children were drawn.
        topology: of the draft, N nodes.
        node_tokens: of the draft, N.
        logits: after every node [N, V].
        rule: by which the text is drawn.
        prefix: token ids up to and including the root.
    """

    def __init__(
        self,
        drawn: Mapping[int, Drawn],
        topology: TreeTopology,
        node_tokens: Sequence[int],
        logits: torch.Tensor,
        rule: SamplingRule,
        prefix: Sequence[int],
    ) -> None:
        self._drawn, self._topology, self._node_tokens = drawn, topology, node_tokens
        self._logits, self._rule, self._prefix = logits, rule, prefix
        self._is_chain = topology.is_chain
        self._chain: list[int] = []
        if self._is_chain and drawn:
            self._chain = draw_along(
                rule, logits, prefix, node_tokens[1:], [drawn[node] for node in sorted(drawn)]
            )

    def choose(self, node: int, emitted: Sequence[int]) -> int | None:
        """Return the token after a node, given those emitted before it; None if it is to be drawn as ever."""
        if self._is_chain:
            return self._chain[len(emitted)] if len(emitted) < len(self._chain) else None
        if node not in self._drawn:
            return None
        children = [self._node_tokens[child] for child in self._topology.children[node]]
        prefix = [*self._prefix, *emitted]
        return draw_among(self._rule, self._logits[node], prefix, children, self._drawn[node])


def draw_among(
    rule: SamplingRule,
    logits: torch.Tensor,
    prefix: Sequence[int],
    children: Sequence[int],
    drawn: Drawn,
) -> int:
    """Return a draw of the token after a prefix, which is that of a child as often as possible.

    A child that was drawn with probability q is accepted with probability min(1, p / q), p the model's; else
    p becomes max(0, p - q) and the child leaves q, both scaled to a sum of 1, and the next child is asked.

    Sources: speculative sampling, arXiv 2302.01318 and 2211.17192; several children, none twice: Z. Chen et
    al., Sequoia, arXiv 2402.12374, section 3.2.
    """
    left = rule.probabilities(logits, prefix)  # p [V]
    proposed = _spread(drawn, left)  # q [V]
    numbers = rule.uniform(len(children), left.device)
    for token, number in zip(children, numbers, strict=True):
        if number * proposed[token] <= left[token]:
            return token
        rest = (left - proposed).clamp_(min=0)
        total = rest.sum()
        left = rest / total if total > 0 else left  # 0: p and q are one, but for rounding
        proposed[token] = 0
        proposed /= proposed.sum().clamp_(min=torch.finfo(proposed.dtype).tiny)
    return rule.draw(left)


def draw_along(
    rule: SamplingRule,
    logits: torch.Tensor,
    prefix: Sequence[int],
    tokens: Sequence[int],
    drawn: Sequence[Drawn],
) -> list[int]:
    """Return the first tokens of a chain of drawn ones, and a draw after them: as many as possible, given that all
    have the distribution of draws one after the other.

    Args:
        rule: by which the text is drawn.
        logits: after the prefix and each token of the chain, [n + 1, V].
        prefix: token ids before the chain.
        tokens: of the chain, n.
        drawn: from what each was drawn, n.

    Source: Z. Sun et al., Block Verification Accelerates Speculative Decoding, arXiv 2403.10444, algorithm 2
    (M_b -> `own`, M_s -> `proposed`, p_i -> `share`, h_i -> `chance`).
    """
    count, share, accepted = len(tokens), 1.0, 0
    numbers = rule.uniform(count, logits.device).tolist()
    left = logits[0]
    for place in range(count + 1):
        own = rule.probabilities(logits[place], [*prefix, *tokens[:place]])
        if place == count:
            excess, chance = own, share
        else:
            proposed = _spread(drawn[place], own)
            excess = (share * own - proposed).clamp_(min=0)
            total = float(excess.sum())
            chance = total / (total + 1.0 - share) if total > 0 else 0.0
        if place == 0:
            left = excess if chance > 0 else own
        elif chance > 0 and numbers[place - 1] <= chance:
            accepted, left = place, excess
        if place < count:
            token = tokens[place]
            share = min(1.0, share * float(own[token] / proposed[token]))
            if not share:  # such as a token that a grammar forbids: what follows it is not asked
                break
    return [*tokens[:accepted], rule.draw(left / left.sum())]


def _spread(drawn: Drawn, like: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of all tokens [V], in the dtype and on the device of others."""
    found = torch.zeros_like(like)
    found[list(drawn.token_ids)] = like.new_tensor(drawn.probabilities)
    return found
