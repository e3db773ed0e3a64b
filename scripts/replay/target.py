"""A target model that answers from a recording, and asks the real one only about what is missing.

It offers what the loop needs of a `TargetModel`, so that the loop itself runs unchanged: a replay
is a run whose logits come out of a file. Logits below the K likeliest are minus infinity, but for samples; greedy
decoding and drafters that keep at most K candidates cannot tell.

Rows are those of the pass that asked first. Another pass over the same text rounds differently, so
that where two logits agree to the last digits a live run may rank them the other way round.

Shapes: N nodes, V vocabulary, K likeliest tokens kept, S logit samples.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from evaluation.answers.record import check_weights
from model.backends.passes.cache import TreeCache
from model.backends.target import PassShapes, TargetModel
from model.commands.command_line import UserError, user_errors
from model.commands.loading import check_model, load_target
from model.commands.model_options import ModelOptions
from model.engine.backend import PREFILL_CHUNK, PromptChunk
from model.engine.budget import MAX_DRAFT
from model.engine.read_out import logit_samples_of, sampled_ids
from model.engine.tree import DraftTree, TreeTopology
from model.kernels.operations import top_k
from scripts.replay.recording import EMPTY, RecordedTurn, Recording, Source

UNKNOWN = -1  # the place of a text that is not in the recording


class MissingRowError(LookupError):
    """The recording lacks a text that was asked about, and there is no model to ask."""


class ReplayCache:
    """Stands for a KV cache: for every row the text that it ends."""

    def __init__(self, live: TreeCache | None) -> None:
        self.nodes: list[int] = []  # texts of the recording, one a row
        # The model's own cache; it holds rows of the same text, and lags behind while the recording suffices.
        self.live = live

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
    """Answers from a recording, which grows where there is a model to ask."""

    def __init__(self, recording: Recording, target: TargetModel | None = None) -> None:
        source = recording.source
        self.recording = recording
        self.device = torch.device("cpu")
        self.dtype: torch.dtype = getattr(torch, source.dtype)
        self.vocab_size = source.vocab_size
        self.num_tokens = sys.maxsize  # the prompts were read when they were recorded
        self.chain_only = source.chain_only
        self.turn: RecordedTurn | None = None  # that is replayed; it knows the limit of its context
        # Whether the drafter reads rows of rejected nodes. If not, such a node has no row unless it is known: the
        # nodes of the answer are, and nobody looks at the others.
        self.reads_rejected = True
        self._target = target

    def check_model(self) -> None:
        """Check the real model, if there is one; a recording does not change."""
        if self._target is not None:
            self._target.check_model()

    @property
    def head_share(self) -> float:
        """The real model's; 0 without one, where logits that were recorded cost nothing."""
        return self._target.head_share if self._target is not None else 0.0

    def hidden_states(self, layers: tuple[int, ...]) -> Any:
        """Raise ValueError: hidden states are not recorded."""
        raise ValueError(
            f"replay: got a method that reads hidden states of layers {layers}; allowed: logits"
        )

    def context_limit(self) -> int | None:
        assert self.turn is not None
        return self.turn.context

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
        return ReplayCache(self._target.new_cache(capacity) if self._target else None)

    def prefill(
        self, prompt_ids: Sequence[int], cache: ReplayCache, with_logits: bool
    ) -> Iterator[PromptChunk]:
        """Read the prompt up to its last token, in the model's chunks."""
        read = prompt_ids[:-1]
        for begin in range(cache.length, len(read), PREFILL_CHUNK):
            chunk = read[begin : begin + PREFILL_CHUNK]
            logits = self.forward(DraftTree.chain(chunk), cache)
            yield PromptChunk(chunk, logits if with_logits else None)

    def forward(self, tree: DraftTree, cache: ReplayCache) -> torch.Tensor:
        """Append all nodes and return their logits [N, V]."""
        return self._logits(self._append(tree, cache))

    def _append(self, tree: DraftTree, cache: ReplayCache) -> list[int]:
        """Append a tree's nodes to the cache; return their texts, -1 for those without a row."""
        tokens, parents = tree.token_ids.tolist(), tree.topology.parents
        start, nodes = cache.last, list[int]()
        for token, parent in zip(tokens, parents, strict=True):
            before = start if parent < 0 else nodes[parent]
            nodes.append(self.recording.child(before, token) if before != UNKNOWN else UNKNOWN)
        if UNKNOWN in nodes and self.reads_rejected:
            self._ask(tree.topology, tokens, nodes, cache)
        cache.nodes += nodes
        return nodes

    def _ask(
        self, topology: TreeTopology, tokens: Sequence[int], nodes: list[int], cache: ReplayCache
    ) -> None:
        """Ask the model about the nodes of a tree that have no row, and record their texts.

        The pass reads no more than it must: what the model's cache lacks of the text, as a chain, and under it
        the unknown nodes and those above them.
        """
        if self._target is None or cache.live is None:
            raise MissingRowError("a text that was asked about is not in the recording")
        target, live = self._target, cache.live
        if live.length > cache.length:
            live.keep(cache.length, ())
        unread = [self.recording.token(node) for node in cache.nodes[live.length :]]
        while len(unread) > PREFILL_CHUNK:
            token_ids = torch.tensor(unread[:PREFILL_CHUNK], device=target.device)
            target.read(token_ids, live.length, live, last_logits_only=True)
            unread = unread[PREFILL_CHUNK:]
        asked = [index for index, node in enumerate(nodes) if node == UNKNOWN]
        read = sorted({above for node in asked for above in topology.path_to(node)})
        # Place of a node in the pass; -1, the parent of the root, is the end of what was unread.
        places = {node: len(unread) + place for place, node in enumerate((-1, *read), start=-1)}
        parents = topology.parents
        drafted = DraftTree.from_lists(
            [*unread, *(tokens[node] for node in read)],
            (*range(-1, len(unread) - 1), *(places[parents[node]] for node in read)),
        )
        base = live.length
        logits = target.forward(drafted, live)[[places[node] for node in asked]]
        live.keep(base, range(len(unread)))
        values, ids = top_k(logits, self.recording.source.top_k)
        rows = [
            part.cpu().numpy() for part in (ids.int(), values.float(), logit_samples_of(logits))
        ]
        for index, *row in zip(asked, *rows, strict=True):
            before = cache.last if parents[index] < 0 else nodes[parents[index]]
            nodes[index] = self.recording.add(before, tokens[index], *row)

    def _logits(self, nodes: list[int]) -> torch.Tensor:
        """Return the logits [N, V] after these texts; NaN where there is no row."""
        ids, values, logit_samples = self.recording.rows(nodes)
        logits = torch.full((len(nodes), self.vocab_size), -torch.inf)
        logits[:, list(sampled_ids(self.vocab_size))] = torch.from_numpy(logit_samples)
        logits.scatter_(1, torch.from_numpy(ids).long(), torch.from_numpy(values))
        logits[[place for place, node in enumerate(nodes) if node == UNKNOWN]] = torch.nan
        return logits


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


def load_recorded_model(source: Source, threads: int | None = None) -> TargetModel:
    """Load the model of a recording, to ask it for more, with so many CPU threads.

    Raises:
        UserError: if it is not there, or has other weights.
    """
    with user_errors():
        options = ModelOptions(model_path=source.model_path, dtype=source.dtype, threads=threads)
    model = check_model(options)
    fingerprint = source.model_fingerprint
    check_weights(
        options.model_path, model.hf_config, fingerprint, "the recording is", "record again"
    )
    return load_target(options, model)
