"""AdaPLD: prompt lookup that asks the model's states which place to copy from, with branches of likely tokens.

Of the places where the text's last n-gram occurred, the one counts where the model's state was most similar to
the one now. Where not even the last token occurred, the place with the most similar state of all does. What
followed there is the main path; beside it, each of the likeliest tokens after the root when it was last read
begins a branch, with the token that followed it at its most similar place.

A node's state is known after its pass, so places are compared by the states before the root and before its likes.

Source: R. Liu et al., AdaPLD: Adaptive Retrieval and Reuse for Efficient Model-Free Speculative Decoding, arXiv
2606.05742: lexical retrieval first, semantic where it fails, branched hypotheses. Only the abstract was to be had,
and no code of the authors; the rest follows another project's reading of the paper, github.com/icnatspell/dejavuu,
whose defaults these are. Departures may be larger than they seem.

Shapes: T tokens of the text, D size of a state, C tokens of a prompt chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import normalize

from ...backends.passes.hidden import FINAL
from ...engine.budget import MAX_DRAFT, DraftBudget
from ...engine.drafter import Drafter, Needs, VerifiedStep
from ...engine.tree import DraftTree
from ...options import Options, option
from .drafter import MAX_NGRAM_SIZE

UNKNOWN = -2.0  # less similar than any state


@dataclass(frozen=True, slots=True)
class AdaPldConfig(Options):
    max_ngram_size: int = option(3, "longest suffix n-gram looked up", least=1, most=MAX_NGRAM_SIZE)
    num_pred_tokens: int = option(10, "length of the main path", least=1, most=MAX_DRAFT)
    branches: int = option(4, "likely tokens of which each begins a branch", least=0, most=256)


class AdaPldDrafter(Drafter):
    config_class = AdaPldConfig
    needs = Needs(hidden_layers=(FINAL,))

    def __init__(self, config: AdaPldConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        self._num_branches = min(config.branches, vocab_size)
        self.max_nodes = 1 + config.num_pred_tokens + 2 * self._num_branches
        self.needs = replace(self.needs, num_candidates=self._num_branches)
        self.start([])

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._text: list[int] = []
        # n-gram -> where its continuations start
        self._places: dict[tuple[int, ...], list[int]] = {}
        # Likeliest tokens after each token when it was last read.
        self._rows: dict[int, Sequence[int]] = {}
        self._states = torch.empty(0, 0)  # of all tokens but the last, of length 1; room for more
        self._num_states = 0
        self._append(prompt_ids)

    def observe_prompt_hidden(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        self._keep(hidden)

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Return the main path, then the branches; where only a chain is allowed, the first of these."""
        likeness = self._likeness()
        main = self._copied(likeness)
        others = [token for token in self._rows.get(context[-1], ()) if token not in main[:1]]
        branches = [
            branch[: budget.max_depth]
            for branch in (
                main,
                *([token, *self._after((token,), likeness, 1)] for token in others),
            )
            if branch
        ]
        tokens, parents = [context[-1]], [-1]
        for branch in branches[:1] if budget.chain_only else branches:
            parents += [0, *range(len(tokens), len(tokens) + len(branch) - 1)][: len(branch)]
            tokens += branch
        return DraftTree.from_lists(tokens, tuple(parents))

    def observe(self, step: VerifiedStep) -> None:
        """Keep the rows of all nodes, and states and tokens of the accepted ones."""
        acceptance = step.acceptance
        for node in acceptance.accepted_last(step.tree.topology):
            row = acceptance.candidates.token_ids[node][: self._num_branches]
            self._rows[acceptance.node_tokens[node]] = row
        assert step.hidden is not None
        self._keep(step.hidden[acceptance.path[: len(acceptance.tokens)]])
        self._append(acceptance.tokens)

    def _copied(self, likeness: Sequence[float]) -> list[int]:
        """Return what followed the text's last n-gram, else the most similar state; empty if there is none."""
        text, length = self._text, self.config.num_pred_tokens
        for size in range(min(self.config.max_ngram_size, len(text)), 0, -1):
            if found := self._after(tuple(text[-size:]), likeness, length):
                return found
        if len(likeness) < 2:
            return []
        likest = max(range(len(likeness) - 1), key=likeness.__getitem__)
        start = likest + 2  # the root's like is between
        return text[start : start + length]

    def _after(self, ngram: tuple[int, ...], likeness: Sequence[float], length: int) -> list[int]:
        """Return what followed an n-gram at the most similar of its places, of equals the latest."""
        places = self._places.get(ngram, ())
        scored = ((likeness[place - 2] if place > 1 else UNKNOWN, place) for place in places)
        _, best = max(scored, default=(UNKNOWN, len(self._text)))
        return self._text[best : best + length]

    def _likeness(self) -> Sequence[float]:
        """Return how similar the last known state is to each before it, from -1 to 1."""
        if self._num_states < 2:
            return [UNKNOWN] * len(self._text)
        states = self._states[: self._num_states]
        found: list[float] = (states[:-1] @ states[-1]).tolist()
        return found

    def _keep(self, hidden: torch.Tensor) -> None:
        """Keep the states [C, D] of the next tokens."""
        rows = normalize(hidden.float(), dim=-1)
        end = self._num_states + len(rows)
        if end > len(self._states):
            grown = rows.new_empty(max(2 * end, 256), rows.shape[1])
            if self._num_states:
                grown[: self._num_states] = self._states[: self._num_states]
            self._states = grown
        self._states[self._num_states : end] = rows
        self._num_states = end

    def _append(self, tokens: Sequence[int]) -> None:
        """Add tokens; an n-gram has a place when its continuation exists, so no suffix finds itself."""
        text = self._text
        for token in tokens:
            end = len(text)
            for size in range(1, min(self.config.max_ngram_size, end) + 1):
                self._places.setdefault(tuple(text[end - size :]), []).append(end)
            text.append(token)
