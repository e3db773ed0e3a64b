"""RACER: what followed the text's end in earlier texts, then recycled logits, as one tree.

An automaton holds the n-grams of prompts and answers with their counts. The continuations of every
suffix of the text that it knows are drafted first, the most frequent ones if there are too many. The
rest of the nodes goes to a tree of copied logits: the likeliest tokens after each token when it was
last read, as in Token Recycling, but with a breadth that is halved along the tree instead of a
template. It grows from the same root into the retrieved paths, until the draft is full.

Every node of that tree has a breadth, its largest number of children, and passes a share of it on: the first child
gets half of its parent's breadth (under the root: all), each further child half of what the one before it got, and
none less than 1 (paper, equation 3). Nodes are expanded level by level, in the draft itself: a guess that is there
already costs nothing, and is expanded too.

Source: Z. Zhang et al., RACER: Retrieval-Augmented Contextual Rapid Speculative Decoding, arXiv
2604.14885, and its code, github.com/hkr04/RACER at 1ef37ab (n -> `ngram`; capacity of the automaton -> `max_nodes`;
breadth of the root -> `max_breadth`; draft size C, root included -> `num_nodes` + 1).

Shapes: C prompt tokens in a chunk, V vocabulary, R rows, k tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...budget.memory import check_ids, check_names, check_size, check_tensor
from ...engine.budget import MAX_DRAFT, DraftBudget
from ...engine.drafter import Drafter, Needs, VerifiedStep
from ...engine.tree import DraftTree
from ...kernels.operations import top_k
from ...options import Options, option, start_option
from .automaton import ROOT, Automaton, PathTree

ROWS = "adjacency"


class CopiedRows:
    """For each token, the k likeliest tokens after it when it was last read.

    A token that was never read has k times token 0, as in the authors' code; one past V has no row.
    """

    def __init__(self, vocab_size: int, k: int) -> None:
        self._vocab_size = vocab_size
        self._k = k
        self._empty = [0] * k
        self._rows: dict[int, list[int]] = {}

    def write(self, tokens: Sequence[int], rows: Sequence[list[int]]) -> None:
        """Write the likeliest tokens [R, k or more] after each token; of equal tokens the last one wins."""
        k, vocab_size, known = self._k, self._vocab_size, self._rows
        for token, row in zip(tokens, rows, strict=True):
            if token < vocab_size:
                known[token] = row[:k]

    def grow(
        self, tree: PathTree, top: int, num_nodes: int, max_depth: int, is_chain: bool
    ) -> None:
        """Add guesses to a draft after its node `top`, up to `num_nodes` in all and `max_depth` below `top`.

        In a chain only the likeliest token follows each node.
        """
        queue = [(top, 1 if is_chain else self._k, 0)]  # node, breadth, depth
        reached = {top}  # a token may be in a row more than once: its first place counts
        for node, breadth, depth in queue:  # grows meanwhile
            token = tree.tokens[node]
            if depth == max_depth or token >= self._vocab_size:
                continue
            share = breadth if depth == 0 else breadth >> 1
            row = self._rows.get(token, self._empty)[:breadth]
            for place, guess in enumerate(row):
                child = tree.find(node, guess)
                if child is None:
                    if len(tree.tokens) >= num_nodes:
                        continue
                    child = tree.child(node, guess)
                if child not in reached:
                    reached.add(child)
                    queue.append((child, max(1, share >> place), depth + 1))

    def clear(self) -> None:
        self._rows.clear()

    def describe(self) -> str:
        return f"rows of {self._k} likely tokens: {len(self._rows)} of {self._vocab_size}"

    def state(self) -> torch.Tensor:
        """Return the rows of all tokens, int32 [V, k]."""
        state = torch.zeros(self._vocab_size, self._k, dtype=torch.int32)
        if self._rows:
            state[list(self._rows)] = torch.tensor(list(self._rows.values()), dtype=torch.int32)
        return state

    def load_state(self, state: torch.Tensor) -> None:
        """Load a `state`, or raise ValueError if it does not fit."""
        shape, hint = (self._vocab_size, self._k), " (vocabulary of the model, max_breadth)"
        check_tensor("matrix: got", state, "int32", shape, hint)
        check_ids(state, self._vocab_size)
        written = state.any(dim=1).nonzero().flatten()
        self._rows = dict(zip(written.tolist(), state[written].tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class RacerConfig(Options):
    num_nodes: int = option(63, "drafted nodes of a step, at most", least=1, most=MAX_DRAFT)
    ngram: int = option(
        10, "tokens of the n-grams that are looked up; 0: no retrieval", least=0, most=256
    )
    max_nodes: int = option(10_000, "most nodes of the automaton", least=2, most=2**20)
    max_breadth: int = option(
        8, "likeliest tokens kept for each token, and drafted after the root; 0: no logits", least=0
    )
    start: str = start_option("n-grams and logits live")

    def _check(self) -> None:
        if self.max_nodes <= self.ngram:
            raise ValueError(
                f"max_nodes: got {self.max_nodes} with n-grams of {self.ngram} tokens; allowed: "
                f"{self.ngram + 1} or more"
            )


class RacerDrafter(Drafter):
    config_class = RacerConfig

    def __init__(self, config: RacerConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        if config.max_breadth > vocab_size:
            raise ValueError(
                f"max_breadth: got {config.max_breadth}; allowed: 0 to {vocab_size}, the vocabulary"
            )
        check_size("max_breadth", vocab_size, config.max_breadth)
        self.max_nodes = 1 + config.num_nodes
        self.needs = Needs(
            num_candidates=config.max_breadth,
            prompt_logits=config.max_breadth > 0,
            cold_start=config.start == "cold",
        )
        self._automaton = Automaton(config.max_nodes)
        self._rows = CopiedRows(vocab_size, config.max_breadth)
        self._text: list[int] = []
        self._state = ROOT  # of the text in the automaton

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Count the prompt's n-grams, its last token, the first root, left out."""
        self._text = list(prompt_ids)
        self._state = ROOT
        if size := self.config.ngram:
            for begin in range(len(prompt_ids) - size):
                self._automaton.add(prompt_ids[begin : begin + size])
            self._automaton.build_links()

    def observe_prompt(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        _, top_ids = top_k(logits, self.config.max_breadth)
        self._rows.write(token_ids, top_ids.tolist())

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Return the retrieved paths and the tree of copied logits, merged."""
        size, depth, is_chain = self.max_nodes, budget.max_depth, budget.chain_only
        tree = PathTree(context[-1])
        retrieved = self._automaton.retrieve(self._state, tree, size, depth, is_chain)
        self._state = retrieved.state
        if self.config.max_breadth:
            # Only a chain goes on where retrieval ended.
            end, begun = (retrieved.end, retrieved.depth) if is_chain else (0, 0)
            self._rows.grow(tree, end, size, depth - begun, is_chain)
        return DraftTree.from_lists(*tree.flat())

    def observe(self, step: VerifiedStep) -> None:
        """Write the row of every node in the order of the tree, and count the n-grams of the new text."""
        acceptance = step.acceptance
        if self.config.max_breadth:
            self._rows.write(acceptance.node_tokens, acceptance.candidates.token_ids)
        self._extend(acceptance.tokens, followed=acceptance.tokens[:-1])

    def skip(self, tokens: Sequence[int]) -> None:
        """Count the n-grams of the new text, and follow the root too, as `propose` does."""
        self._extend(tokens, followed=[self._text[-1], *tokens[:-1]])

    def _extend(self, tokens: Sequence[int], followed: Sequence[int]) -> None:
        """Append new tokens, count their n-grams, and go on in the automaton, up to before the next root."""
        self._text += tokens
        size = self.config.ngram
        if not size:
            return
        root = len(self._text) - 1
        for end in range(root, max(root - len(tokens), size - 1), -1):
            self._automaton.add(self._text[end - size : end])
        if followed:
            self._state = self._automaton.advance(self._state, followed)

    def reset(self) -> None:
        self._automaton.clear()
        self._rows.clear()

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the automaton and the rows, int32 [V, max_breadth]."""
        return {**self._automaton.state(), ROWS: self._rows.state()}

    def load_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        check_names(tensors, self.memory())
        self._rows.load_state(tensors[ROWS])
        self._automaton.load_state(tensors)

    def describe(self) -> str:
        return f"automaton of at most {self.config.max_nodes} nodes; {self._rows.describe()}"
