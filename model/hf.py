"""The target model: a stock Hugging Face causal LM, unmodified, that can verify draft trees.

All contact with transformers' models is here and in `model.kv_cache`. A tree goes into the model as
an additive 4-D float mask (a dict of masks for models with `layer_types`), explicit positions and a
`TreeCache`. What the model can verify is read off its declared properties and the layers of its own
cache, and proved by `model.self_test`. A model that computes positions from key indices (alibi)
verifies chains only; one with recurrent state is refused.

Shapes: N nodes, T cached tokens, V vocabulary, L tokens of a plain pass, C prompt tokens in a
chunk.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from model.draft_tree import DraftTree, TreeTopology
from model.kv_cache import BufferShape, LayerShape, TreeCache

logger = logging.getLogger(__name__)

MASK_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
# The attention implementations that take a 4-D float mask. flex_attention aborts the process on
# one, flash attention takes none.
ATTENTION = ("sdpa", "eager")
# Prompt tokens in one forward pass: bounds the logits held at once to [C, V].
PREFILL_CHUNK = 512


class UnsupportedModelError(ValueError):
    """The model cannot be verified exactly; the text says why in one line."""


class PromptChunk(NamedTuple):
    """A chunk of the prompt that the model has read: its tokens and, if asked for, the logits after
    each [C, V].
    """

    token_ids: Sequence[int]
    logits: torch.Tensor | None


class TargetModel:
    """A loaded causal LM, checked, with the operations that decoding needs.

    Args:
        model: a loaded `AutoModelForCausalLM` on its device(s), in eval mode.

    Attributes:
        chain_only: whether drafts must be chains.
        chain_reason: why, in one line; empty if trees work.

    Raises:
        UnsupportedModelError: if the model can verify neither trees nor chains exactly.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.device = model.get_input_embeddings().weight.device
        self.dtype = model.dtype
        self._parameters = set(inspect.signature(model.forward).parameters)
        self._refuse_what_cannot_be_verified()
        self._layer_types = sorted(set(getattr(self.config, "layer_types", None) or ()))
        self._set_attention()
        self._layer_shapes, self.vocab_size = self._probe_shapes()
        self.chain_reason = self._why_chain_only()

    @property
    def chain_only(self) -> bool:
        """Whether drafts must be chains."""
        return bool(self.chain_reason)

    def new_cache(self, capacity: int) -> TreeCache:
        """Return an empty cache for `capacity` tokens (prompt, new tokens and one tree)."""
        return TreeCache(self._layer_shapes, capacity)

    def context_limit(self, prompt_length: int) -> int | None:
        """Return the most tokens (prompt and new) that this prompt may grow to; None if the model
        sets no limit.

        Dynamic and longrope position embeddings depend on the largest position of a call, so that
        text which crosses their border differs from plain decoding whatever the method: the border
        is the limit.
        """
        config = self.config
        limits = [
            limit
            for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
            if isinstance(limit := getattr(config, name, None), int) and limit > 0
        ]
        limit = limits[0] if limits else None
        for rope in _rope_settings(config):
            kind = rope.get("rope_type", rope.get("type", "default"))
            border = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            if kind == "longrope" and border and prompt_length < border:
                limit = min(limit or border, border)
        return limit

    def forward(self, tree: DraftTree, cache: TreeCache) -> torch.Tensor:
        """Append all nodes to the cache and return the logits after every node [N, V]."""
        base = cache.length
        topology = tree.topology
        if topology.is_chain:
            # The model's own causal mask: exact for every model with a croppable cache.
            return self.run(tree.token_ids, base, cache, None)
        masks = self._tree_masks(topology, base)
        positions = topology.depth_tensor(self.device) + base
        return self.run(tree.token_ids, base, cache, masks, positions)

    def prefill(
        self, prompt_ids: Sequence[int], cache: TreeCache, with_logits: bool
    ) -> Iterator[PromptChunk]:
        """Read the prompt up to its last token, chunk by chunk (its last token is the first tree's
        root).
        """
        read = prompt_ids[:-1]
        for begin in range(0, len(read), PREFILL_CHUNK):
            chunk = read[begin : begin + PREFILL_CHUNK]
            token_ids = torch.tensor(chunk, device=self.device)
            logits = self.run(token_ids, begin, cache, None, last_logits_only=not with_logits)
            yield PromptChunk(chunk, logits if with_logits else None)

    def synchronize(self) -> None:
        """Wait for the device, so that a clock read next counts finished work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _refuse_what_cannot_be_verified(self) -> None:
        config = self.config
        name = f"model type {config.model_type}"
        if getattr(self.model.config, "is_encoder_decoder", False):
            raise UnsupportedModelError(
                f"{name}: is an encoder-decoder; allowed: decoder-only models"
            )
        if getattr(self.model, "_is_stateful", False):
            raise UnsupportedModelError(
                f"{name}: keeps recurrent state, which cannot be rolled back after a rejected draft"
            )
        if "past_key_values" not in self._parameters:
            raise UnsupportedModelError(
                f"{name}: its forward takes no past_key_values, so it has no KV cache"
            )
        unknown = set(getattr(config, "layer_types", None) or ()) - set(MASK_LAYER_TYPES)
        if unknown:
            raise UnsupportedModelError(
                f"{name}: has layers of type {', '.join(sorted(map(str, unknown)))}; allowed: "
                f"{', '.join(MASK_LAYER_TYPES)}"
            )
        for layer in DynamicCache(config=self.model.config).layers:
            # Exact types: layers with recurrent or indexed state inherit from these.
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) and (
                type(layer).__name__ != "DummyLayer"
            ):
                raise UnsupportedModelError(
                    f"{name}: caches {type(layer).__name__}; allowed: keys and values of attention alone"
                )
        for rope in _rope_settings(config):
            if rope.get("rope_type", rope.get("type")) == "dynamic":
                limit = getattr(config, "max_position_embeddings", 0)
                logger.info("%s: dynamic rope is exact up to %d tokens", name, limit)

    def _set_attention(self) -> None:
        implementation = getattr(self.model.config, "_attn_implementation", "eager")
        if implementation in ATTENTION:
            return
        for choice in ATTENTION:
            try:
                self.model.set_attn_implementation(choice)
            except ValueError:
                continue
            logger.warning("attention %s takes no tree mask: using %s", implementation, choice)
            return
        raise UnsupportedModelError(
            f"attention implementation: got {implementation}; allowed: {', '.join(ATTENTION)}"
        )

    def _probe_shapes(self) -> tuple[list[LayerShape | None], int]:
        """Read the shapes of the model's cache, and the number of its logits, off one forward pass."""
        cache = DynamicCache(config=self.model.config)
        with torch.no_grad():
            try:
                logits = self.run(
                    torch.zeros(2, dtype=torch.long, device=self.device), 0, cache, None
                )
            except Exception as error:
                raise UnsupportedModelError(
                    f"model type {self.config.model_type}: a plain forward pass with a cache fails: "
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                ) from error
        shapes = [_layer_shape(layer) for layer in cache.layers]
        if not any(shapes):
            raise UnsupportedModelError(
                f"model type {self.config.model_type}: does not fill a KV cache"
            )
        return shapes, logits.shape[-1]

    def _why_chain_only(self) -> str:
        if "position_ids" not in self._parameters:
            return "its forward takes no position_ids, so that a tree's positions cannot be given"
        if getattr(self.config, "alibi", False):
            return "its alibi positions follow the key index, not position_ids"
        return ""

    def run(
        self,
        token_ids: torch.Tensor,
        base: int,
        cache: DynamicCache | TreeCache,
        masks: torch.Tensor | dict[str, torch.Tensor] | None,
        positions: torch.Tensor | None = None,
        last_logits_only: bool = False,
    ) -> torch.Tensor:
        """Run the model on `token_ids` [L] after `base` cached tokens; return logits [L, V] ([1, V]
        if asked).
        """
        arguments: dict[str, object] = {"input_ids": token_ids[None], "past_key_values": cache}
        if "position_ids" in self._parameters:
            if positions is None:
                positions = torch.arange(base, base + token_ids.shape[0], device=self.device)
            arguments["position_ids"] = positions[None]
        if masks is not None:
            arguments["attention_mask"] = masks
        if last_logits_only and "logits_to_keep" in self._parameters:
            arguments["logits_to_keep"] = 1
        return self.model(**arguments, use_cache=True, return_dict=True).logits[0]

    def _tree_masks(
        self, topology: TreeTopology, base: int
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return the additive mask(s) [1, 1, N, T + N] of a tree after `base` cached tokens."""
        tree_part = topology.additive_mask(self.device, self.dtype)
        full = torch.nn.functional.pad(tree_part, (base, 0))  # [N, T + N]
        if self._layer_types:
            return {
                kind: self._limit(full, kind, topology, base)[None, None]
                for kind in self._layer_types
            }
        kind = (
            "sliding_attention"
            if getattr(self.config, "sliding_window", None)
            else "full_attention"
        )
        return self._limit(full, kind, topology, base)[None, None]

    def _limit(
        self, mask: torch.Tensor, kind: str, topology: TreeTopology, base: int
    ) -> torch.Tensor:
        """Block what a layer type does not see: by position, since a tree's row index is no
        position.
        """
        if kind == "full_attention":
            return mask
        depths = topology.depth_tensor(self.device)
        queries = (depths + base)[:, None]  # [N, 1]
        keys = torch.cat((torch.arange(base, device=self.device), depths + base))[
            None
        ]  # [1, T + N]
        if kind == "chunked_attention":
            size = self.config.attention_chunk_size
            blocked = keys // size != queries // size
        else:
            blocked = keys <= queries - self.config.sliding_window
        return mask.masked_fill(blocked, torch.finfo(mask.dtype).min)


def sampling_processors(temperature: float, top_k: int, top_p: float) -> list[LogitsProcessor]:
    """Return transformers' warpers for these settings, in the order of its own sampling.

    Args:
        temperature: above 0.
        top_k: 0 keeps all tokens.
        top_p: 1 keeps all tokens.
    """
    processors: list[LogitsProcessor] = []
    if temperature != 1:
        processors.append(TemperatureLogitsWarper(temperature))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    return processors


def _rope_settings(config: object) -> list[dict]:
    """Return the rope settings of a config: one, or one a layer type; [] if there are none."""
    settings = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return nested or ([settings] if settings else [])


def _layer_shape(layer: object) -> LayerShape | None:
    """Return the shapes of a filled cache layer; None if the model did not write to it."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None or keys.numel() == 0:
        return None
    return LayerShape(
        *(
            BufferShape(part.shape[1], part.shape[-1], part.dtype, part.device)
            for part in (keys, values)
        )
    )
