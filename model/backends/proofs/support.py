"""Model support, as a model's config and classes tell it before anything runs.

The config gives a readable reason; `model.backends.proofs.self_test` is the proof. A model whose cache holds
anything but rows of attention and states (`model.backends.states`) is refused. A model whose positions or windows
follow the key index instead of `position_ids` verifies chains only.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel

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
