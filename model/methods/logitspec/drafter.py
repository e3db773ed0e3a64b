"""LogitSpec: look up what followed the next token, and what followed every likely token after it.

The logits that chose the next token also say much about the token after it: it is often among the
likeliest ones. So the draft has two parts under the root, the next token: the continuation of the
text's last n-gram, as in prompt lookup; and a branch for each of the likeliest tokens of the last
logits, guessed as the token after the root and continued as the text did after the n-gram that it
completes. Likelier tokens get longer branches.

Of the places where an n-gram occurs, the latest one counts that has all the tokens of a continuation after it; if
none has, the first one, which has the most.

Source: T. Liu et al., LogitSpec: Accelerating Retrieval-based Speculative Decoding via Next Next
Token Speculation, arXiv 2507.01449, and its code, github.com/smart-lty/LogitSpec
(draft_tree_capacity, the root included -> `num_nodes` + 1).

Shapes: C prompt tokens in a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ...engine.budget import MAX_DRAFT, DraftBudget
from ...engine.drafter import Drafter, Needs, VerifiedStep
from ...engine.tree import DraftTree
from ...kernels.operations import top_k
from ...options import Options, option

# Longest branch by the rank of its first token among the last logits, 0 for the likeliest: up to rank 8
# four tokens, up to rank 32 three, then one.
BRANCH_LENGTHS = ((8, 4), (32, 3))
LAST_LENGTH = 1


class NgramPool:
    """The n-grams of a growing text; a whole continuation has `length` tokens."""

    def __init__(self, max_ngram_size: int, length: int) -> None:
        self._sizes = range(max_ngram_size, 0, -1)
        self._length = length
        self._text: list[int] = []
        # n-gram -> where its continuation starts
        self._starts: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        text, starts = self._text, self._starts
        for token in tokens:
            begun = len(text)  # a continuation begins with this token,
            whole = begun + 1 - self._length  # and another one ends with it
            text.append(token)
            for size in self._sizes:
                if size <= begun:
                    starts.setdefault(tuple(text[begun - size : begun]), begun)
                if size <= whole:
                    starts[tuple(text[whole - size : whole])] = whole

    def after(self, ending: Sequence[int]) -> list[int]:
        """Return the continuation of the longest known n-gram at the end of these tokens; empty if none."""
        for size in self._sizes:
            start = self._starts.get(tuple(ending[-size:]))
            if start is not None:
                return self._text[start : start + self._length]
        return []


@dataclass(frozen=True, slots=True)
class LogitSpecConfig(Options):
    num_nodes: int = option(63, "drafted nodes of a step, at most", least=1, most=MAX_DRAFT)
    max_ngram_size: int = option(3, "longest n-gram looked up", least=1, most=256)
    num_pred_tokens: int = option(
        20, "length of the continuation of the next token", least=1, most=MAX_DRAFT
    )
    harvest_prompt: bool = option(
        True, "compute the prompt's logits, so that the first draft has likely tokens too"
    )


class LogitSpecDrafter(Drafter):
    config_class = LogitSpecConfig

    def __init__(self, config: LogitSpecConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        self.max_nodes = 1 + config.num_nodes
        self.needs = Needs(
            num_candidates=min(1 + config.num_nodes, vocab_size),  # one of them is the root
            reads_rejected=False,
            prompt_logits=config.harvest_prompt,
        )
        self._pool = NgramPool(config.max_ngram_size, config.num_pred_tokens)
        self._root = 0  # the last token of the text, which is not indexed yet
        self._likely: Sequence[int] = ()  # the tokens of the logits that chose the root

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Index the prompt, its last token, the first root, left out."""
        self._pool = NgramPool(self.config.max_ngram_size, self.config.num_pred_tokens)
        self._pool.extend(prompt_ids[:-1])
        self._root = prompt_ids[-1]
        self._likely = ()

    def observe_prompt(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        _, top_ids = top_k(logits[-1:], self.needs.num_candidates)
        self._likely = top_ids[0].tolist()

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Return all branches; only the first one if the model verifies chains only."""
        branches = self._branches(context[-self.config.max_ngram_size :], budget.max_depth)
        if budget.chain_only:
            branches = branches[:1]
        tokens, parents = [context[-1]], [-1]
        for branch in branches:
            first = len(tokens)
            tokens += branch
            parents += [0, *range(first, first + len(branch) - 1)]
        return DraftTree.from_lists(tokens, tuple(parents))

    def observe(self, step: VerifiedStep) -> None:
        """Index the text up to the next root, and keep the likeliest tokens of the logits that chose it."""
        acceptance = step.acceptance
        self._extend(acceptance.tokens)
        self._likely = acceptance.candidates.token_ids[acceptance.path[-1]]

    def skip(self, tokens: Sequence[int]) -> None:
        """Index the text up to the next root, whose logits were not seen."""
        self._extend(tokens)
        self._likely = ()

    def _extend(self, tokens: Sequence[int]) -> None:
        self._pool.extend([self._root, *tokens[:-1]])
        self._root = tokens[-1]

    def _branches(self, ending: Sequence[int], max_depth: int) -> list[list[int]]:
        """Return the branches under the last token of an ending, none of them empty."""
        room = self.config.num_nodes
        branches = [self._pool.after(ending)[: min(room, max_depth)]]
        room -= len(branches[0])
        for rank, token in enumerate(self._likely):
            if room == 0:
                break
            if token == ending[-1]:
                continue
            longest = next((length for last, length in BRANCH_LENGTHS if rank <= last), LAST_LENGTH)
            length = min(longest, room, max_depth)
            branches.append([token, *self._pool.after((*ending, token))][:length])
            room -= len(branches[-1])
        return [branch for branch in branches if branch]
