"""SuffixDecoding: continue as earlier answers and this text did after what the text ends with.

Two suffix trees count how often every string of tokens occurred: one in the prompt and the answer in
progress, the other in all answers, the one in progress included. Each suffix of the text that occurs
in a tree has a continuation there; the longer the match, the more tokens are drafted. The continuation
with the largest sum of probabilities becomes the draft. The probability of a token is its count over the count of
the match: the share of the match's occurrences after which the text went on in this way.

Source: G. Oliaro et al., SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications,
arXiv 2411.04975 (alpha, MAX_SPEC = alpha p for a match of p tokens -> `max_spec_factor`; D(N), the
probability of a node -> `min_token_prob` bounds it; SCORE -> `Continuation.score`). Defaults are those of
the authors' library, github.com/snowflakedb/ArcticInference; the number of answers kept is vLLM's.

Shapes: A answers, T tokens of all answers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import torch

from ...budget.memory import check_ids, check_names
from ...engine.budget import MAX_DRAFT, DraftBudget
from ...engine.drafter import Drafter, Needs, VerifiedStep
from ...engine.tree import DraftTree
from ...options import Options, option, start_option
from .suffix_tree import Node, OpenText, SuffixTree, TreePlace

# Every token of a text costs up to so many moves.
MAX_DEPTH = 1024
# Added before rounding down, as in the authors' code, so that ten times 0.1 is 1 token.
ROUNDING = 1e-6
# Memory of a node with its places in dictionary and ranking, and of a token with its 1.3 nodes: answers of the
# demo model, by tracemalloc.
NODE_BYTES, TOKEN_BYTES = 265, 340


@dataclass(slots=True)
class Continuation:
    total: int = 1  # places of the match
    tokens: list[int] = field(default_factory=list)  # drafted tokens, parents before children
    # For each token the index of the one before it, -1 for the end of the match.
    parents: list[int] = field(default_factory=list)
    sum_of_counts: int = 0  # of the tokens

    @property
    def score(self) -> float:
        """Sum of the probabilities of the tokens; equal sums are equal numbers, however they came about."""
        return self.sum_of_counts / self.total

    def add_run(self, run: list[int], parent: int, count: int) -> int:
        """Append tokens one after another, and return the index of the last one."""
        for token in run:
            self.tokens.append(token)
            self.parents.append(parent)
            parent = len(self.tokens) - 1
        self.sum_of_counts += count * len(run)
        return parent


# Of a place, with at most so many tokens of at least such a probability.
Grow = Callable[[TreePlace, int, float], Continuation]


def likeliest_path(place: TreePlace, most: int, least_probability: float) -> Continuation:
    """Return the chain that takes the most frequent token each time."""
    node = place.node
    found = Continuation(node.count)
    parent = found.add_run(node.run(place.position, most), -1, node.count)
    while len(found.tokens) < most and node.ranked:
        node = node.ranked[0]
        if node.count / found.total < least_probability:
            break
        run = node.run(node.begin, most - len(found.tokens))
        parent = found.add_run(run, parent, node.count)
    return found


def likeliest_tree(place: TreePlace, most: int, least_probability: float) -> Continuation:
    """Return the tree that takes the most frequent token each time, of equals the one found first."""
    found = Continuation(place.node.count)
    # (-count, order of discovery, node, where its run goes on, parent)
    queue: list[tuple[int, int, Node, int, int]] = [(-place.node.count, 0, *place, -1)]
    num_seen = 1
    while queue and len(found.tokens) < most:
        _, _, node, index, parent = heappop(queue)
        has_equals = bool(queue) and -queue[0][0] == node.count
        run = node.run(index, 1 if has_equals else most - len(found.tokens))
        parent = found.add_run(run, parent, node.count)
        index += len(run)
        following = (
            [(node, index)]
            if node.run(index, 1)
            else [(child, child.begin) for child in node.ranked]
        )
        for child, begin in following:
            if child.count / found.total < least_probability:
                break
            heappush(queue, (-child.count, num_seen, child, begin, parent))
            num_seen += 1
    return found


SHAPES: Mapping[str, Grow] = {"path": likeliest_path, "tree": likeliest_tree}


class Answers:
    """At most `most` answers; strings of up to `depth` tokens are counted."""

    def __init__(self, depth: int, most: int) -> None:
        self._most = most
        self.tree = SuffixTree(depth)
        # Tokens of the answers that have any, the oldest first.
        self.kept: deque[list[int]] = deque()

    def begin(self) -> OpenText:
        self._make_room()
        return self.tree.open_text()

    def extend(self, answer: OpenText, tokens: Sequence[int]) -> None:
        """Append new tokens to an answer. One that had to leave goes on as a new answer."""
        if not self._most or not tokens:
            return
        if not answer.tokens:
            self._make_room()
            self.kept.append(answer.tokens)
        answer.extend(tokens)

    def clear(self) -> None:
        """Forget all answers; those in progress go on as new ones."""
        self.tree.clear()
        self.kept.clear()

    def _make_room(self) -> None:
        while self.kept and len(self.kept) >= self._most:
            self.tree.remove(self.kept.popleft())


@dataclass(frozen=True, slots=True)
class SuffixConfig(Options):
    num_nodes: int = option(64, "drafted nodes of a step, at most", least=1, most=MAX_DRAFT)
    shape: str = option(
        "path",
        "path: a chain, the most frequent token each time; tree: the most probable tokens of all branches",
        choices=tuple(SHAPES),
    )
    max_tree_depth: int = option(
        64, "tokens of match and draft together, at most", least=2, most=MAX_DEPTH
    )
    max_spec_factor: float = option(
        1.0, "tokens drafted for each token of the match", least=0, most=MAX_DRAFT
    )
    max_spec_offset: float = option(
        0.0, "tokens drafted in addition", least=-MAX_DRAFT, most=MAX_DRAFT
    )
    min_token_prob: float = option(0.1, "smallest probability of a drafted token", least=0, most=1)
    max_cached_answers: int = option(
        10_000, "answers kept, the newest ones; 0: only the current one", least=0
    )
    start: str = start_option("answers are kept")

    def _check(self) -> None:
        for name in ("max_spec_factor", "max_spec_offset", "min_token_prob"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}: got {getattr(self, name)}; allowed: a finite number")


class SuffixDrafter(Drafter):
    config_class = SuffixConfig

    def __init__(self, config: SuffixConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        self.max_nodes = 1 + config.num_nodes
        self.needs = Needs(reads_rejected=False, cold_start=config.start == "cold")
        self._answers = Answers(config.max_tree_depth, config.max_cached_answers)
        self._answer = self._answers.begin()
        self._text = self._new_text()

    def reset(self) -> None:
        self._answers.clear()
        self._text = self._new_text()

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Begin an answer; the oldest one leaves if there are too many."""
        self._text = self._new_text()
        self._text.extend(prompt_ids)
        self._answer = self._answers.begin()

    def _new_text(self) -> OpenText:
        return SuffixTree(self.config.max_tree_depth).open_text()

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Return the best continuation; of equally good ones that of the text."""
        grow = SHAPES["path" if budget.chain_only else self.config.shape]
        known = context[-self.config.max_tree_depth :]
        best = self._best(self._text.places(known), grow, budget.max_depth)
        if self.config.max_cached_answers:
            other = self._best(self._answer.places(known), grow, budget.max_depth)
            best = other if other.score > best.score else best
        parents = [-1, *(1 + parent for parent in best.parents)]
        return DraftTree.from_lists([context[-1], *best.tokens], tuple(parents))

    def _best(self, places: Iterator[TreePlace], grow: Grow, max_depth: int) -> Continuation:
        best = Continuation()
        for length, place in reversed([*enumerate(places, start=1)]):
            by_match = length * self.config.max_spec_factor + self.config.max_spec_offset
            most = max(0, min(int(by_match + ROUNDING), self.max_nodes - 1, max_depth))
            # No shorter match drafts more, and no token is worth more than 1.
            if most <= best.score:
                break
            found = grow(place, most, self.config.min_token_prob)
            if found.score > best.score:
                best = found
        return best

    def observe(self, step: VerifiedStep) -> None:
        self.skip(step.acceptance.tokens)

    def skip(self, tokens: Sequence[int]) -> None:
        self._text.extend(tokens)
        self._answers.extend(self._answer, tokens)

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the answers, int32 [T], and the length of each, int64 [A], the oldest first."""
        answers = self._answers.kept
        tokens = [token for answer in answers for token in answer]
        lengths = [len(answer) for answer in answers]
        return {
            "answers": torch.tensor(tokens, dtype=torch.int32),
            "lengths": torch.tensor(lengths, dtype=torch.int64),
        }

    def load_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load saved answers; their order decides between equally frequent tokens."""
        check_names(tensors, self.memory())
        answers, lengths = tensors["answers"], tensors["lengths"]
        self._check(answers, lengths)
        self.reset()
        for answer in answers.split(lengths.tolist()):
            self._answers.extend(self._answers.begin(), answer.tolist())

    def _check(self, answers: torch.Tensor, lengths: torch.Tensor) -> None:
        kinds = (answers.dtype, answers.ndim, lengths.dtype, lengths.ndim)
        if kinds != (torch.int32, 1, torch.int64, 1):
            raise ValueError(
                f"matrix: got {answers.dtype} and {lengths.dtype} of {answers.ndim} and {lengths.ndim} "
                "dimensions; allowed: answers, int32, and their lengths, int64, of one dimension"
            )
        if bool((lengths < 1).any()) or int(lengths.sum()) != len(answers):
            raise ValueError(
                f"matrix: got lengths that do not add up to its {len(answers)} tokens; allowed: lengths of "
                "1 or more that do"
            )
        if len(lengths) > self.config.max_cached_answers:
            raise ValueError(
                f"matrix: got {len(lengths)} answers; allowed: at most {self.config.max_cached_answers}, "
                "the max_cached_answers"
            )
        check_ids(answers, self.vocab_size)

    def describe(self) -> str:
        num_nodes = self._answers.tree.num_nodes
        return (
            f"tree of answers: {len(self._answers.kept)} answers, {num_nodes:,} nodes, about "
            f"{NODE_BYTES * num_nodes / 2**20:.1f} MiB; "
            f"at most {self.config.max_cached_answers:,} answers, some {TOKEN_BYTES} bytes a token"
        )
