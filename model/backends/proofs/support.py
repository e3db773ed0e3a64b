"""Model support, as a model's config and classes tell it before anything runs.

The config gives a readable reason; `model.backends.proofs.self_test` is the proof. A model whose cache holds
anything but rows of attention and states (`model.backends.states`) is refused. A model whose positions or windows
follow the key index instead of `position_ids` verifies chains only. Lengths of a text that change what a model
computes are its context, borders of rotary frequencies, and scales (`Borders`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel

from ...engine.budget import MAX_DRAFT
from ..passes.masks import WITH_MASK
from ..states.layers import HAS_STATE_LAYERS, holds_state, new_own_cache, own_cache_class

logger = logging.getLogger(__name__)

# Layer types beside those of attention: with states, and those that keep nothing. Older versions of
# transformers 5 call them and attention by names of each model's.
STATE_LAYER_TYPES = ("linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba")
OTHER_LAYER_TYPES = ("moe", "mlp", "attention")
# Layers of transformers' caches that `TreeCache` can stand for. Layers that inherit from these may keep more.
CACHE_LAYERS = frozenset(
    (
        *("DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DummyLayer"),
        *("LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer"),
        "LinearAttentionAndSlidingWindowAttentionLayer",
    )
)
CACHE_ARGUMENTS = ("past_key_values", "cache", "cache_params")
# The attention implementations that take a 4-D float mask. flex_attention aborts the process on
# one, flash attention takes none.
ATTENTION = ("sdpa", "eager")
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
# Setting of rotary embeddings whose model also scales queries by position (Ministral 3).
SCALED_BY_POSITION = "llama_4_scaling_beta"
PREPARE = "prepare_inputs_for_generation"
NO_HIDDEN = "use a method that reads no hidden states"


class UnsupportedModelError(ValueError):
    """The model cannot be verified exactly; the message says why in one line."""


def uncompiled(model: Any) -> Any:
    """Return the model that a compiled one wraps, or the model itself."""
    return getattr(model, "_orig_mod", model)


def forward_parameters(model: PreTrainedModel) -> frozenset[str]:
    """Return the names that the model's forward takes.

    A forward from outside transformers that takes any name, `forward(self, *args, **kwargs)`, is taken to
    hand them on to the one that it replaces; the self-test finds out.
    """
    own = uncompiled(model)
    places = [own, *type(own).__mro__]
    names: set[str] = set()
    for place in places:
        if (forward := vars(place).get("forward")) is None:
            continue
        parameters = inspect.signature(forward).parameters
        names.update(parameters)
        takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        if not takes_any or str(getattr(forward, "__module__", "")).startswith("transformers."):
            break
    return frozenset(names)


def cache_argument(model: PreTrainedModel) -> str | None:
    """Return the name under which the model's forward takes its cache; None if it takes none.

    transformers 5.24 renamed `past_key_values` to `cache`; Mamba has `cache_params`.
    """
    names = forward_parameters(model)
    return next((name for name in CACHE_ARGUMENTS if name in names), None)


def holds_tokens(cache: Any) -> bool:
    """Whether a cache of transformers holds rows or states of any token."""
    layers = getattr(cache, "layers", ())
    if any(map(holds_state, layers)):
        return True
    has_rows = not layers or any(hasattr(layer, "get_seq_length") for layer in layers)
    return has_rows and bool(cache.get_seq_length())


def new_cache(model: PreTrainedModel) -> Cache:
    """Return an empty cache of the class that the model's own generation uses.

    Raises:
        UnsupportedModelError: if the model has a class of its own that is made in a way of its own.
    """
    own = own_cache_class(model)
    if own is None:
        return DynamicCache(config=model.config)
    try:
        cache: Cache = new_own_cache(own, model)
    except ValueError as error:
        raise UnsupportedModelError(
            f"model type {model.config.model_type}: keeps recurrent state, and its {error}; allowed: "
            "transformers' own cache layers"
        ) from error
    return cache


def refuse_unverifiable(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if the config says that the cache cannot be rolled back after a draft."""
    name = f"model type {model.config.model_type}"
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name}: is an encoder-decoder; allowed: decoder-only models")
    if cache_argument(model) is None:
        raise UnsupportedModelError(
            f"{name}: its forward takes no {' or '.join(CACHE_ARGUMENTS)}, so it has no cache that can be "
            "rolled back after a rejected draft"
        )
    config = model.config.get_text_config(decoder=True)
    layer_types = set(getattr(config, "layer_types", None) or ())
    has_states = getattr(model, "_is_stateful", False) or layer_types.intersection(
        STATE_LAYER_TYPES
    )
    if has_states and not HAS_STATE_LAYERS and own_cache_class(model) is None:
        raise UnsupportedModelError(
            f"{name}: keeps recurrent state, which can be rolled back from transformers 5 on"
        )
    allowed = (*WITH_MASK, *STATE_LAYER_TYPES, *OTHER_LAYER_TYPES)
    unknown = layer_types.difference(allowed)
    if unknown:
        raise UnsupportedModelError(
            f"{name}: has layers of type {', '.join(sorted(map(str, unknown)))}; allowed: "
            f"{', '.join(allowed)}"
        )
    for place, module in uncompiled(model).get_decoder().named_modules():
        # Shown by a prompt without a mask alone, as of one shorter than a window.
        if hasattr(module, "layer_idx") and getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError(
                f"{name}: the attention of {place} sees later tokens; allowed: is_causal True"
            )
    for layer in getattr(new_cache(model), "layers", ()):
        if (kind := type(layer).__name__) not in CACHE_LAYERS:
            raise UnsupportedModelError(
                f"{name}: caches {kind}; allowed: {', '.join(sorted(CACHE_LAYERS))}"
            )


def why_chain_only(model: PreTrainedModel) -> str:
    """Return why drafts must be chains, as far as the config tells; empty if trees are possible."""
    if "position_ids" not in forward_parameters(model):
        return "its forward takes no position_ids, so that a tree's positions cannot be given"
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "alibi", False):
        return "its alibi positions follow the key index, not position_ids"
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo
        return "the windows of its local layers follow the key index, not position_ids"
    return ""


def use_masked_attention(model: PreTrainedModel) -> None:
    """Switch the model to an attention implementation that takes a tree's mask, with a warning.

    Raises:
        UnsupportedModelError: if it has none.
    """
    config = model.config.get_text_config(decoder=True)
    implementation = getattr(config, "_attn_implementation", None) or "eager"
    if implementation in ATTENTION:
        return
    for choice in ATTENTION:
        try:
            model.set_attn_implementation(choice)
        except ValueError:
            continue
        logger.warning("attention %s takes no tree mask: using %s", implementation, choice)
        return
    raise UnsupportedModelError(
        f"attention implementation: got {implementation}; allowed: {', '.join(ATTENTION)}"
    )


def refuse_autocast(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse passes in another dtype than the weights': near-ties and kernels go by theirs.

    Raises:
        ValueError: if autocast is on, to another dtype.
    """
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return
    if (other := torch.get_autocast_dtype(kind)) != dtype:
        raise ValueError(
            f"autocast: computes in {other}; allowed: off, or the model's {dtype}; load the model in "
            "the dtype to decode in"
        )


def layers_of(model: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    """Return the layers of a causal LM with their name: the outermost list with one module a layer; raise
    UnsupportedModelError if there is none.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return name, module
    raise UnsupportedModelError(
        f"hidden states: found no list of {num_layers} layers in {type(model).__name__}; {NO_HIDDEN}"
    )


def eos_ids_of(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Return the ids that end a sequence: the generation config's, and the tokenizer's if there is one."""
    found = getattr(model.generation_config, "eos_token_id", None)
    if isinstance(found, torch.Tensor):
        found = found.flatten().tolist()
    listed = found if isinstance(found, Sequence) else [found]
    of_tokenizer = getattr(tokenizer, "eos_token_id", None)
    return frozenset(token for token in (*listed, of_tokenizer) if token is not None)


class Borders(NamedTuple):
    """Lengths at which the numbers of a model change. No draft reaches over one.

    Attributes:
        rope: length beyond which rotary frequencies change: those of a pass follow its last position, and cached
            rows keep theirs. None: never.
        is_dynamic: whether each token beyond it changes them again (dynamic NTK), so that none can be drafted.
        reads_anew: whether transformers' generation drops the cache there and reads the text again (Phi 3, PhiMoE).
        query_step, query_offset: queries of some layers are scaled by `(key index + offset) // step` (Llama 4, and
            Ministral 3 in transformers 5.0; a tree has more keys than its text). 0: never.
    """

    rope: int | None = None
    is_dynamic: bool = False
    reads_anew: bool = False
    query_step: int = 0
    query_offset: int = 0

    @classmethod
    def of(cls, model: Any, config: Any) -> Borders:
        """Return the borders of a model with this text config.

        Raises:
            UnsupportedModelError: if it has one, and its own code does not say what happens there.
        """
        rope, is_dynamic = rope_border(config)
        reads_anew = rope is not None and not is_dynamic and _drops_cache(model, rope)
        if getattr(config, "attn_temperature_tuning", False):
            return cls(rope, is_dynamic, reads_anew, config.floor_scale, 1)
        scaled = (one for one in rope_settings(config) if one.get(SCALED_BY_POSITION))
        step = next(scaled, {}).get("original_max_position_embeddings", 0)
        return cls(rope, is_dynamic, reads_anew, step)

    def max_depth(self, base: int) -> int:
        """Return how deep a draft after `base` cached tokens may be."""
        if self.rope is None or (base >= self.rope and not self.is_dynamic):
            return MAX_DRAFT
        return max(0, self.rope - 1 - base)

    def are_crossed(self, base: int, num_nodes: int) -> bool:
        """Whether the keys of a tree of up to `num_nodes` nodes after `base` cached tokens reach over one.

        PhiMoE in transformers 4.57 takes its longrope scale from the number of keys.
        """
        if self.rope and base < self.rope < base + num_nodes:
            return True
        step, first = self.query_step, base + self.query_offset
        return bool(step) and first // step != (first + num_nodes - 1) // step


def rope_border(config: Any) -> tuple[int | None, bool]:
    """Return the length beyond which the rotary frequencies change, None for never, and whether by every token."""
    for rope in rope_settings(config):
        kind = rope.get("rope_type", rope.get("type"))
        if kind == "dynamic":
            return config.max_position_embeddings, True
        if kind == "longrope":
            border = rope.get("original_max_position_embeddings")
            return border or getattr(config, "original_max_position_embeddings", None), False
    return None, False


def _drops_cache(model: Any, border: int) -> bool:
    """Whether the model's generation reads a text without its cache at the first token beyond the border."""
    model = uncompiled(model)
    own = getattr(type(model), PREPARE, None)
    if own is None or own.__module__ == "transformers.generation.utils":
        return False  # the usual way
    name = cache_argument(model) or ""
    cache, rows = new_cache(model), torch.empty(1, 1, border, 0)
    cache.update(rows, rows, 0)
    inputs = {name: cache, "cache_position": torch.tensor([border])}
    try:
        prepared = model.prepare_inputs_for_generation(
            torch.zeros(1, border + 1, dtype=torch.long), **inputs
        )
    except Exception as error:  # a model's own code may raise anything
        raise UnsupportedModelError(
            f"model type {model.config.model_type}: cannot say what its generation does beyond {border} tokens, "
            f"where rotary frequencies change: {type(error).__name__}: {error}"
        ) from error
    return prepared.get(name) is None


def context_limit(config: Any) -> int | None:
    """Return the most tokens, prompt and new, of a text; None if there is no limit.

    Dynamic rotary frequencies stretch it by their factor.
    """
    limits = (getattr(config, name, None) for name in CONTEXT_NAMES)
    limit = next((one for one in limits if isinstance(one, int) and one > 0), None)
    if limit and rope_border(config)[1]:
        limit = int(limit * max(rope.get("factor", 1) for rope in rope_settings(config)))
    # Doge drops keys beyond its window by their rank, and the order of equals depends on the pass.
    window = getattr(config, "keep_window_size", None)
    return min(limit or window, window) if window else limit


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """Return the rope settings of a config: one, or one a layer type; [] if there are none."""
    settings = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return nested or ([settings] if settings else [])
