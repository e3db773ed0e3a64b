"""A target model that answers from a trace, and while one is recorded asks the real one about what is missing.

It offers what the loop needs of a `TargetModel`, so that the loop itself runs unchanged: a replay is a run whose
read-outs come out of a file. Logits that are not recorded are cut; greedy decoding and drafters that keep at most K
candidates cannot tell.

After a text that was not recorded, which only a draft can hold, the drafter is shown the row of another text that
ends with the same token. Such texts are counted.

Shapes: N nodes, V vocabulary, K likeliest tokens kept, S logit samples.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from evaluation.replay.costs import StepCosts
from evaluation.replay.trace import (
    EMPTY,
    LARGEST,
    LARGEST_SAMPLE,
    LOGIT_STEPS,
    RecordedQuestion,
    Row,
    Source,
    whole,
)
from model.backends.passes.cache import TreeCache
from model.backends.target import PassShapes, TargetModel, most_in_chunk
from model.commands.command_line import UserError
from model.engine.backend import PromptChunk
from model.engine.budget import MAX_DRAFT
from model.engine.read_out import Candidates, ReadOut, likeliest, logit_samples_of
from model.engine.tree import DraftTree, TreeTopology
from model.kernels.linear import MOST_ROWS_WITH_VECTORS

UNKNOWN = -1  # the place of a text that is not in the trace
# By how much a logit is lifted for each recorded one after it, so that their order is kept where they are equal;
# less than half a sixteenth in all.
LIFT = 2.0**-12


class ReplayCache:
    """Stands for a KV cache: for every row the text that it ends."""

    def __init__(self, live: TreeCache | None) -> None:
        self.nodes: list[int] = []  # texts of the trace, one a row
        # The model's own cache; it holds rows of the same text, and lags behind while the trace suffices.
        self.live = live
        self.num_prompt = 0  # tokens that are read as a prompt

    @property
    def length(self) -> int:
        return len(self.nodes)

    @property
    def last(self) -> int:
        return self.nodes[-1] if self.nodes else EMPTY

    def keep(self, base: int, rows: Sequence[int]) -> None:
        """Keep the first `base` rows and, after them, the rows `base + rows[i]`; forget the others."""
        self.nodes[base:] = [self.nodes[base + row] for row in rows]

    def mark(self) -> None:
        """Do nothing: all recorded rows can be gone back to."""


class ReplayTarget(PassShapes):
    """Answers from a trace, which grows where there is a model to ask.

    Attributes:
        question: that is answered.
        reads_rejected: whether the drafter reads rows of rejected nodes. Without, none is asked about or counted.
        num_read: tokens of a row that it reads.
        reads_samples: whether it reads logit samples.
        num_unrecorded: for each pass, how many of its texts were not recorded as far as the drafter reads them.
    """

    def __init__(
        self, source: Source, live: TargetModel | None = None, costs: StepCosts | None = None
    ) -> None:
        self.source = source
        self.device = torch.device("cpu")
        self.tie_margin = 0.0  # the recorded choice is the model's
        self.vocab_size = source.vocab_size
        self.num_tokens = sys.maxsize  # the prompts were read when they were recorded
        self.chain_only, self.head_share = source.chain_only, source.head_share
        self.question: RecordedQuestion
        self.reads_rejected, self.num_read, self.reads_samples = True, 1, False
        self.num_unrecorded: list[int] = []
        self.live, self._costs = live, costs  # the model, while it is recorded
        self._now = 0.0  # milliseconds of all passes so far

    def now_ns(self) -> int:
        """Return the time by the costs of the passes so far."""
        return int(self._now * 1e6)

    def check_model(self) -> None:
        """Check the real model, if there is one; a trace does not change."""
        if self.live is not None:
            self.live.check_model()

    def hidden_states(self, layers: tuple[int, ...]) -> Any:
        """Raise ValueError: hidden states are not recorded."""
        raise ValueError(
            f"replay: got a method that reads hidden states of layers {layers}; allowed: logits"
        )

    def context_limit(self) -> int | None:
        return self.source.context

    def chain_only_at(self, base: int, num_nodes: int) -> bool:
        """Whether drafts must be chains; models where that changes in the text are not recorded."""
        return self.chain_only

    def max_depth_at(self, base: int) -> int:
        """Return the most: models with a border in the text are not recorded."""
        return MAX_DRAFT

    def reads_anew_at(self, base: int) -> bool:
        """Return False, likewise."""
        return False

    def is_reference(self, num_rows: int) -> bool:
        """Return True: a recorded row is the same in whatever pass."""
        return True

    def reference(self) -> AbstractContextManager[None]:
        """Return a block that changes nothing."""
        return nullcontext()

    def like(self, model: Any) -> TargetModel:
        """Return a target of another model, whose passes are not replayed."""
        return TargetModel(model)

    def synchronize(self) -> None:
        """Do nothing: the rows are on the host."""

    def new_cache(self, capacity: int) -> ReplayCache:
        return ReplayCache(self.live.new_cache(capacity) if self.live else None)

    def prefill(
        self, prompt_ids: Sequence[int], cache: ReplayCache, with_logits: bool
    ) -> Iterator[PromptChunk]:
        """Read the prompt up to its last token, in the model's chunks."""
        read = prompt_ids[:-1]
        size = most_in_chunk(self.vocab_size)
        for begin in range(cache.length, len(read), size):
            chunk = read[begin : begin + size]
            is_last = begin + size >= len(read)
            cache.num_prompt = begin + len(chunk)
            nodes, _ = self._append(
                DraftTree.chain(chunk), cache, with_logits, is_last, is_text=True
            )
            yield PromptChunk(chunk, self._dense(nodes) if with_logits else None)

    def forward(self, tree: DraftTree, cache: ReplayCache) -> torch.Tensor:
        """Append all nodes; return no logits, [N, 0]: `read_out` has what is read of them."""
        num_nodes = tree.topology.num_nodes
        if self._costs is not None:
            self._now += self._costs.of_pass(num_nodes, cache.length)
        is_root = num_nodes == 1
        _, num_lacking = self._append(tree, cache, self.reads_rejected, is_root, is_text=is_root)
        self.num_unrecorded.append(num_lacking)
        return torch.empty(num_nodes, 0)

    def read_out(
        self,
        cache: ReplayCache,
        tree: DraftTree,
        logits: torch.Tensor,
        num_candidates: int,
        with_samples: bool,
    ) -> ReadOut:
        """Return what is read of the last pass with this cache."""
        tokens = tree.token_ids.tolist()
        nodes = self._shown(cache.nodes[-len(tokens) :], tokens)
        found = Candidates(*self.question.rows(nodes, num_candidates))
        samples = torch.from_numpy(self.question.samples(nodes)) if with_samples else None
        return ReadOut(tokens, found, samples, [math.inf] * len(tokens))

    def _shown(self, nodes: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Return the texts whose rows are shown for these, which end with these tokens."""
        if UNKNOWN not in nodes:
            return list(nodes)
        after = self.question.after
        known = next((node for node in nodes if node != UNKNOWN), 1)
        return [
            after.get(token, known) if node == UNKNOWN else node
            for node, token in zip(nodes, tokens, strict=True)
        ]

    def _append(
        self, tree: DraftTree, cache: ReplayCache, is_read: bool, is_wide: bool, is_text: bool
    ) -> tuple[list[int], int]:
        """Append a tree's nodes to the cache; return their texts, `UNKNOWN` for those that are not recorded.

        If their rows are read (`is_read`), the second number is how many have not what the drafter reads of one.
        Where there is a model, it was asked about these and, of a chain that `is_text`, about all; of the last one
        as much as of an answer's if that `is_wide`.
        """
        tokens, parents = tree.token_ids.tolist(), tree.topology.parents
        start, nodes = cache.last, list[int]()
        for token, parent in zip(tokens, parents, strict=True):
            before = start if parent < 0 else nodes[parent]
            nodes.append(self.question.child(before, token) if before != UNKNOWN else UNKNOWN)
        needs = self.num_read, self.reads_samples
        lacking = [
            place
            for place, node in enumerate(nodes)
            if node == UNKNOWN or (is_read and self.question.lacks(node, *needs))
        ]
        if lacking and (is_read or is_text) and self.live is not None:
            self._ask(self.live, tree.topology, tokens, nodes, lacking, cache, is_wide, is_text)
            lacking = []
        cache.nodes += nodes
        return nodes, len(lacking) if is_read else 0

    def _ask(
        self,
        target: TargetModel,
        topology: TreeTopology,
        tokens: Sequence[int],
        nodes: list[int],
        asked: Sequence[int],
        cache: ReplayCache,
        is_wide: bool,
        is_text: bool,
    ) -> None:
        """Ask the model about these nodes of a tree, and record their texts.

        The pass reads no more than it must: these nodes and those above them. What the model's cache lacks of the
        text is read first, as in a run: a prompt in its chunks, and what follows in passes of few rows, since
        passes of many round otherwise.
        """
        live = cache.live
        assert live is not None, "a model has a cache"
        if live.length > cache.length:
            live.keep(cache.length, ())
        ends = range(topology.num_nodes) if is_text else asked  # a prompt's chunk is read whole
        read = sorted({above for node in ends for above in topology.path_to(node)})
        if live.length < cache.num_prompt:
            prompt = [self.question.token(node) for node in cache.nodes[: cache.num_prompt]]
            for _ in target.prefill([*prompt, 0], live, with_logits=False):  # but any root
                pass
        unread = [self.question.token(node) for node in cache.nodes[live.length :]]
        while len(unread) > max(0, MOST_ROWS_WITH_VECTORS - len(read)):
            piece, unread = unread[:MOST_ROWS_WITH_VECTORS], unread[MOST_ROWS_WITH_VECTORS:]
            token_ids = torch.tensor(piece, device=target.device)
            target.read(token_ids, live.length, live, last_logits_only=True)
        # Place of a node in the pass; -1, the parent of the root, is the end of what was unread.
        places = {node: len(unread) + place for place, node in enumerate((-1, *read), start=-1)}
        parents = topology.parents
        drafted = DraftTree.from_lists(
            [*unread, *(tokens[node] for node in read)],
            (*range(-1, len(unread) - 1), *(places[parents[node]] for node in read)),
        )
        base = live.length
        logits = target.forward(drafted, live)[[places[node] for node in asked]]
        live.keep(base, range(drafted.topology.num_nodes if is_text else len(unread)))
        for index, row in zip(asked, rows_of(logits, self.source.num_likeliest), strict=True):
            before = cache.last if parents[index] < 0 else nodes[parents[index]]
            if not (is_wide and index == asked[-1]):
                samples = row.samples if self.reads_samples else None
                row = Row(row.token_ids[: self.num_read], row.logits[: self.num_read], samples)
            nodes[index] = self.question.add(before, tokens[index], row)

    def _dense(self, nodes: Sequence[int]) -> torch.Tensor:
        """Return logits [N, V] after texts of a prompt: those that the drafter reads, with their samples.

        What others read of a row is left out: it may tie with the last one.
        """
        logits = torch.full((len(nodes), self.vocab_size), -float(LARGEST))
        for place, node in enumerate(nodes):
            count = min(self.num_read, self.question.width(node))
            (token_ids,), (values,) = self.question.rows([node], count)
            lifts = LIFT * torch.arange(len(values), 0, -1)
            logits[place, token_ids] = torch.tensor(values) + lifts
        vars(logits)["samples"] = torch.from_numpy(self.question.samples(nodes))
        return logits


def rows_of(logits: torch.Tensor, num_likeliest: int) -> Iterator[Row]:
    """Yield what may be recorded of each row of logits [N, V]."""
    values, token_ids = likeliest(logits, min(num_likeliest, logits.shape[1]))
    chosen = logits.argmax(dim=1, keepdim=True)  # of equal logits the first, as in plain decoding
    token_ids = token_ids.where(token_ids != chosen, token_ids[:, :1].clone())
    token_ids[:, :1] = chosen
    samples = whole(logit_samples_of(logits).cpu().numpy(), 1, LARGEST_SAMPLE).astype(np.int8)
    steps = whole(values.cpu().numpy(), LOGIT_STEPS, LARGEST).astype(np.int16)
    for row in zip(token_ids.int().cpu().numpy(), steps, samples, strict=True):
        yield Row(*row)


def refuse_unrecordable(target: TargetModel, longest: int) -> None:
    """Refuse models for which a row is not a function of the text, up to `longest` tokens.

    Raises:
        UserError: if positions where only chains can be verified, or rotary frequencies that follow
            the length of the text, lie within; or if the model keeps recurrent states, which cannot go back
            to any earlier text.
    """
    if target.mixers:
        raise UserError(
            f"model type {target.config.model_type}: keeps recurrent states; allowed: attention only"
        )
    if target.chain_only_at(0, longest) != target.chain_only:
        raise UserError(
            f"model type {target.config.model_type}: verifies trees in a part of the text only; "
            f"texts of up to {longest} tokens cannot be recorded"
        )
