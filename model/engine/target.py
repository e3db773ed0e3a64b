"""The target model: a stock Hugging Face causal LM, unmodified, that can verify draft trees.

Decoding calls transformers' models here only; caches, support checks and the parts of a pass have
modules of their own (`model.engine.cache`, `model.engine.support`, `model.engine.passes`). A tree goes
into the model as an additive 4-D float mask (a dict of masks for models with `layer_types`), explicit
positions and a `TreeCache`. What the model can verify is read from its config and proved by
`model.engine.self_test`.

Shapes: N nodes, T cached tokens, V vocabulary, L tokens of a plain pass, C prompt tokens in a
chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from transformers import Cache, PreTrainedModel

from ..kernels.packed import num_weights, stored
from ..machine.hardware import machine_key, uploaded
from .cache import TreeCache
from .own_code import OwnCode
from .passes.arithmetic import PassArithmetic
from .passes.hidden import HiddenStates
from .passes.layout import CacheLayout
from .passes.masks import Masks, TreeMasks
from .passes.packed import PackedCache, PackedPasses
from .passes.probes import probes_of_nodes, reading_probes
from .passes.shapes import ANY_SHAPE, PassShapes
from .passes.shared import SharedPasses
from .passes.slot_passes import SlotPasses
from .read_out import ReadOut, read_out
from .support import (
    KeyBorders,
    UnsupportedModelError,
    cache_argument,
    context_limit,
    forward_parameters,
    refuse_autocast,
    refuse_unverifiable,
    use_masked_attention,
    why_chain_only,
)
from .tree import DraftTree, TreeTopology

# Most prompt tokens C in one forward pass, and most logits [C, V] held at once. The same for all
# methods, whether they want logits or not, since other shapes round differently. Later chunks cost
# more than the first (their mask is a tensor), so short chunks are slow.
PREFILL_CHUNK = 2048
MAX_LOGITS = 2**26
FEWEST_IN_CHUNK = 512  # whatever the vocabulary
# Rows of a cache off the CPU are a multiple of this. A GPU's memory comes from an allocator that keeps what is
# freed by its size: buffers of another size for each text, 0.5 MB a row for 7B, would leave it in pieces.
CAPACITY_STEP = 512
IN_TRAINING = "model: is in training mode, in which layers may be random; call model.eval() first"


class PromptChunk(NamedTuple):
    """A chunk of the prompt that was read: its tokens and, if asked for, the logits after each [C, V]."""

    token_ids: Sequence[int]
    logits: torch.Tensor | None


class TargetModel(PassArithmetic):
    """A loaded causal LM, checked, with the operations that decoding needs.

    Args:
        model: a loaded `AutoModelForCausalLM` on its device(s), in eval mode.
        use_kernels: whether passes may use the kernels of `model/kernels`; else
            the model computes as transformers does.

    Attributes:
        chain_only: whether drafts must be chains.
        chain_reason: why, in one line; empty if trees work.
        cache_argument: the name under which the model's forward takes its cache.
        num_tokens: rows of the input embedding.
        key_borders: what the model scales by the number of keys.
        layer_shapes, mixers, num_state_bytes, vocab_size: as `CacheLayout`.
        is_same_in_parts: whether a text has the same rows and states in whatever parts it is read, but
            for rounding, so that a known beginning may be kept; the self-test finds out.
        uses_slots: whether texts of a batch lie in slots (`passes.slot_passes`): on a GPU, and where they
            cannot be packed.
        code: the model's own code, with which it passed the self-test.

    Raises:
        UnsupportedModelError: if the model can verify neither trees nor chains exactly.
        ValueError: if autocast would compute in another dtype than the weights'.
    """

    def __init__(self, model: PreTrainedModel, use_kernels: bool = True) -> None:
        self.model = model
        self.use_kernels = use_kernels
        refuse_unverifiable(model)
        with self.lock:
            use_masked_attention(model)
        self.config = model.config.get_text_config(decoder=True)
        weight = stored(model.get_input_embeddings())
        if weight.is_meta:
            raise UnsupportedModelError(
                "model: its weights are on the device meta, which holds no numbers; load it on a device "
                "such as cpu"
            )
        self.dtype, self.device, self.num_tokens = model.dtype, weight.device, len(weight)
        refuse_autocast(self.device, self.dtype)
        self._parameters = forward_parameters(model)
        self.cache_argument = cache_argument(model) or ""  # checked by `refuse_unverifiable`
        self.masks = TreeMasks(self.config)
        self.key_borders = KeyBorders.of(self.config)
        self._layout = layout = CacheLayout(model)
        with self.lock, torch.no_grad():
            layout.probe(self.run)
        self.layer_shapes, self.mixers = layout.shapes, layout.mixers
        self.num_state_bytes, self.vocab_size = layout.num_state_bytes, layout.vocab_size
        self.is_same_in_parts = True
        with self.lock:
            self.code = OwnCode.of(model)
        self._hidden: dict[tuple[int, ...], HiddenStates] = {}
        # Measurements of this model by other packages, by name.
        self.measured: dict[str, Any] = {}
        self.uses_slots = self.device.type == "cuda" and self.is_on_one_device
        # Without attention there are no positions.
        self.chain_reason = why_chain_only(model) if self._attention_shape else ""

    def like(self, model: PreTrainedModel) -> TargetModel:
        """Return a target for another model on the same device, whose passes run as those of this one."""
        return TargetModel(model, self.use_kernels)

    def check_unchanged(self) -> None:
        """Check that the model is still as it was loaded; switch its attention again if it was changed.

        Raises:
            ValueError: if it is in training mode, or was moved, cast or resized, or would compute in
                another dtype.
        """
        refuse_autocast(self.device, self.dtype)
        if self.model.training:
            raise ValueError(IN_TRAINING)
        weight = stored(self.model.get_input_embeddings())
        now = (self.model.dtype, weight.device, len(weight))
        then = (self.dtype, self.device, self.num_tokens)
        if now != then:
            got, allowed = ("{} on {} with {} tokens".format(*state) for state in (now, then))
            raise ValueError(
                f"model: got {got}; allowed: {allowed}, as it was; make a new decoder for a model that was "
                "moved, cast or resized"
            )
        with self.lock:
            use_masked_attention(self.model)

    @property
    def shapes(self) -> PassShapes:
        """The shapes in which passes run: here any."""
        return ANY_SHAPE

    @property
    def chain_only(self) -> bool:
        """Whether drafts must be chains."""
        return bool(self.chain_reason)

    @property
    def machine_key(self) -> str:
        """A hash of everything that the time of a pass depends on."""
        facts = (
            self.config.to_json_string(use_diff=False),
            self.model.config._attn_implementation,
            type(self).__name__,
        )
        return machine_key(facts, self.device, self.dtype)

    @property
    def is_on_one_device(self) -> bool:
        """Whether all rows of a cache are on the model's device."""
        parts = (part for shape in self.layer_shapes if shape for part in shape.buffers)
        return all(part.device == self.device for part in parts)

    @cached_property
    def head_share(self) -> float:
        """Share of the output head in the model's weights, 0 to 1."""
        head = self.model.get_output_embeddings()
        total = num_weights(self.model)
        return num_weights(head) / total if head is not None else 0.0

    def hidden_states(self, layers: tuple[int, ...]) -> HiddenStates:
        """Return the capture of these hidden states of passes (`Needs.hidden_layers`).

        Raises:
            UnsupportedModelError: if the model does not show them; found out by a plain pass.
        """
        if layers not in self._hidden:
            self._hidden[layers] = HiddenStates(
                self.model,
                self.config.num_hidden_layers,
                layers,
                self.device,
                self.lock,
                partial(self._layout.plain_pass, self.run, last_logits_only=True),
            )
        return self._hidden[layers]

    def check_probes(self) -> None:
        """Check that passes can read probes (`DraftTree.probe`).

        Raises:
            UnsupportedModelError: if they cannot; found out by a plain pass.
        """
        with self.lock, torch.no_grad():
            probe = self.model.get_input_embeddings()(
                torch.zeros(1, dtype=torch.long, device=self.device)
            )
            self._layout.plain_pass(self.run, probes=probe)

    def plain_pass(self, num_tokens: int) -> Any:
        return self._layout.plain_pass(self.run, num_tokens)[0]

    def new_cache(self, capacity: int) -> TreeCache:
        """Return an empty cache for `capacity` tokens (prompt, new tokens and one tree), or a few more."""
        if self.device.type != "cpu":
            capacity = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP
        return self._layout.new_cache(capacity)

    def shared_passes(self, size: int) -> SharedPasses:
        """Return the passes of a batch of up to `size` texts, for models whose texts can share passes
        (`model.engine.packing`).
        """
        return SlotPasses(self, size) if self.uses_slots else PackedPasses(self)

    @property
    def capturing(self) -> HiddenStates | None:
        """The hidden states that a pass of this thread is to leave; None if none are captured."""
        return next((states for states in self._hidden.values() if states.is_capturing), None)

    def context_limit(self, prompt_length: int) -> int | None:
        """Return the most tokens that this prompt may grow to; None if the model sets no limit."""
        return context_limit(self.config, prompt_length)

    def chain_only_at(self, base: int, num_nodes: int) -> bool:
        """Whether a draft of up to `num_nodes` nodes after `base` cached tokens must be a chain."""
        return self.chain_only or self.key_borders.are_crossed(base, num_nodes)

    def forward(self, tree: DraftTree, cache: TreeCache) -> torch.Tensor:
        """Append all nodes to the cache; return the logits after every node [N, V], valid until the next pass."""
        base = cache.length
        topology = tree.topology
        masks, positions = None, None
        with self.kernels(topology.num_nodes):
            if self._needs_mask(topology):
                masks = self.masks.of_tree(topology, base, self.device, self.dtype)
                positions = topology.depth_tensor(self.device) + base
            with self._branching(topology, cache):
                token_ids = uploaded(tree.token_ids, self.device)
                return self.run(token_ids, base, cache, masks, positions, probes=tree.probe)

    def forward_packed(
        self, trees: Sequence[DraftTree], caches: Sequence[TreeCache]
    ) -> torch.Tensor:
        """Append the nodes of several texts' trees, each to its cache, in one pass; for models that can be packed
        (`model.engine.packing`).

        Returns:
            The logits after every node, text after text, [S, V].
        """
        topologies = [tree.topology for tree in trees]
        bases = [cache.length for cache in caches]
        sizes = [topology.num_nodes for topology in topologies]
        token_ids = uploaded(torch.cat([tree.token_ids for tree in trees]), self.device)
        depths = [topology.depth_tensor(self.device) for topology in topologies]
        positions = torch.cat([part + base for part, base in zip(depths, bases, strict=True)])
        with self.kernels(len(token_ids), is_packed=True):
            masks = self.masks.of_texts(topologies, bases, self.device, self.dtype)
            cache = PackedCache(caches, sizes, self.masks.has_windows)
            probes = probes_of_nodes(trees)
            return self.run(token_ids, max(bases), cache, masks, positions, probes=probes)

    def _needs_mask(self, topology: TreeTopology) -> bool:
        """Whether a draft is given a mask; the model's own causal mask is enough for a chain.

        On a GPU that mask is boolean, and is made additive and aligned anew in every layer.
        """
        if topology.is_chain and (self.device.type != "cuda" or self.chain_only):
            return False
        return topology.num_nodes > 1 and self._attention_shape is not None

    def read_out(
        self,
        cache: TreeCache,
        tree: DraftTree,
        logits: torch.Tensor,
        num_candidates: int,
        with_sketches: bool,
    ) -> ReadOut:
        """Copy to the host what is read of the last pass with this cache, over this tree (`read_out`)."""
        return read_out(tree, logits, num_candidates, with_sketches)

    def _branching(self, topology: TreeTopology, cache: TreeCache) -> AbstractContextManager[None]:
        """Return the block to read a draft in: states are read from each node's parent on."""
        if topology.num_nodes == 1 or not self.mixers:
            return nullcontext()  # plain decoding
        tree = topology.by_level(self.device)
        return cache.states.branching(tree, self.mixers, cache.layers, cache.length)

    def prefill(
        self, prompt_ids: Sequence[int], cache: TreeCache, with_logits: bool
    ) -> Iterator[PromptChunk]:
        """Read the prompt in chunks from the cache's end to its last token, which is the first tree's root."""
        read = prompt_ids[:-1]
        size = min(PREFILL_CHUNK, max(FEWEST_IN_CHUNK, MAX_LOGITS // self.vocab_size))
        if self.key_borders.rope and len(prompt_ids) > self.key_borders.rope:
            # Chunks before the border would get the frequencies of short texts.
            size, with_logits = len(read), False
        elif not self.is_same_in_parts:  # such as recurrences that begin anew with each chunk
            with_logits = with_logits and len(read) <= size
            size = max(1, len(read))
        for begin in range(cache.length, len(read), size):
            chunk = read[begin : begin + size]
            token_ids = uploaded(chunk, self.device)
            logits = self.read(token_ids, begin, cache, last_logits_only=not with_logits)
            yield PromptChunk(chunk, logits if with_logits else None)

    def read(
        self, token_ids: torch.Tensor, base: int, cache: TreeCache, last_logits_only: bool
    ) -> torch.Tensor:
        """Run the model on a chunk of the prompt; as `run`."""
        with self.kernels(len(token_ids)):
            return self.run(token_ids, base, cache, None, last_logits_only=last_logits_only)

    def synchronize(self) -> None:
        """Wait for the device, so that a clock read next counts finished work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def run(
        self,
        token_ids: torch.Tensor,
        base: int,
        cache: Cache,
        masks: Masks | None,
        positions: torch.Tensor | None = None,
        last_logits_only: bool = False,
        probes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the model on `token_ids` [L] after `base` cached tokens; return logits [L, V] or the last, [1, V].

        Args:
            token_ids: [L].
            base: cached tokens.
            cache: of the text, to which the rows are appended.
            masks: what each row sees; None: the text up to it.
            positions: [L]; None: those after the cached tokens.
            last_logits_only: whether the last row's logits suffice.
            probes: the embedding of tokens `PROBE`, [D] or [L, D]; None if there are none.
        """
        arguments: dict[str, object] = {self.cache_argument: cache}
        if "position_ids" in self._parameters:
            if positions is None:
                positions = torch.arange(base, base + token_ids.shape[0], device=self.device)
            arguments["position_ids"] = positions[None]
        if (cache_position := self._layout.cache_position(base, len(token_ids))) is not None:
            arguments["cache_position"] = cache_position
        if masks is not None:
            arguments["attention_mask"] = masks
        if last_logits_only and "logits_to_keep" in self._parameters:
            arguments["logits_to_keep"] = 1
        has_states = isinstance(cache, TreeCache) and cache.states
        with (
            cache.states.reading(token_ids.shape[0]) if has_states else nullcontext(),
            reading_probes(self.model.get_input_embeddings(), token_ids[None], probes) as input_ids,
        ):
            logits: torch.Tensor = self.model(
                input_ids=input_ids, **arguments, use_cache=True, return_dict=True
            ).logits
        return logits[0].to(self.device)  # a model spread over devices returns them on its last one

    def run_texts(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        masks: Masks,
        cache: Cache,
        probes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the model on N tokens of each of B texts, as a batch; return logits [B, N, V].

        Args:
            token_ids: [B, N].
            positions: [B, N].
            masks: of B texts.
            cache: holds the rows of B texts.
            probes: the embedding of each text's tokens `PROBE`, [B, 1, D]; None if there are none.
        """
        arguments: dict[str, object] = {self.cache_argument: cache, "attention_mask": masks}
        if "position_ids" in self._parameters:
            arguments["position_ids"] = positions
        if "cache_position" in self._parameters:
            # Without it, transformers 4.57 asks the cache for its length; masks and positions are given.
            arguments["cache_position"] = torch.arange(token_ids.shape[1], device=self.device)
        with reading_probes(self.model.get_input_embeddings(), token_ids, probes) as input_ids:
            logits: torch.Tensor = self.model(
                input_ids=input_ids, **arguments, use_cache=True, return_dict=True
            ).logits
        return logits
