"""Model support and a model's own code, as its config and classes tell them before anything runs.

The config gives a readable reason; `model.backends.proofs.self_test` is the proof. A model whose cache holds
anything but rows of attention and states (`model.backends.states`) is refused. A model whose positions or windows
follow the key index instead of `position_ids` verifies chains only.

A model may have code that is not of transformers' classes: hooks, and functions from elsewhere (`OwnCode`). Such
code may treat the last position of a pass in a way of its own, or the steps of generation. A plain pass over
several tokens says nothing of it then, so such models are proved token by token
(`model.backends.proofs.plain_decoding`), and again when this code has changed.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
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
NO_HIDDEN = "use a method that reads no hidden states"


class UnsupportedModelError(ValueError):
    """The model cannot be verified exactly; the message says why in one line."""


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


# Its hooks only watch.
HIDDEN = __name__.replace("proofs.support", "passes.hidden")
FORWARD, PREPARE = "forward", "prepare_inputs_for_generation"
OF_TRANSFORMERS = (
    "transformers."  # not "transformers_modules.", where code of checkpoints is loaded
)


@dataclass(frozen=True, slots=True)
class OwnCode:
    """A model's own code at one time."""

    # PyTorch's numbers, which it gives once; those of all modules among them.
    hooks: tuple[int, ...]
    functions: tuple[Any, ...]  # that were set on single modules
    is_of_class: bool  # whether the model's class, or a base of it, brings some from elsewhere

    @classmethod
    def of(cls, model: nn.Module) -> OwnCode:
        """Return the code of a model now; the caller holds the lock of its passes, whose hooks do not count."""
        hooks = [
            *torch_module._global_forward_hooks,
            *torch_module._global_forward_pre_hooks,
        ]
        functions = []
        for module in model.modules():
            own = module.__dict__
            if module._forward_hooks or module._forward_pre_hooks:
                hooks += _hooks_of(module)
            if FORWARD in own and not _moves_weights(module):
                functions.append(own[FORWARD])
        model = uncompiled(model)
        functions += [model.__dict__[PREPARE]] if PREPARE in model.__dict__ else []
        is_of_class = any(_is_from_elsewhere(type(model), name) for name in (FORWARD, PREPARE))
        return cls(tuple(hooks), tuple(functions), is_of_class)

    @property
    def is_on_modules(self) -> bool:
        """Whether anything was set on single modules, or hooked into all of them."""
        return bool(self.hooks or self.functions)

    def __bool__(self) -> bool:
        """Whether there is any code from outside transformers, as far as can be seen."""
        return self.is_on_modules or self.is_of_class


def uncompiled(model: Any) -> Any:
    """Return the model that a compiled one wraps, or the model itself."""
    return getattr(model, "_orig_mod", model)


def _hooks_of(module: nn.Module) -> Iterator[int]:
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for number, hook in [*hooks.items()]:  # other threads may add some meanwhile
            if not is_watching(hook):
                yield number


def is_watching(hook: Any) -> bool:
    """Whether a hook is one by which transformers or `passes.hidden` only watch."""
    name = str(getattr(hook, "__module__", None))
    return name.startswith(OF_TRANSFORMERS) or name == HIDDEN


def _moves_weights(module: nn.Module) -> bool:
    """Whether a module's forward is accelerate's around that of its class."""
    hook = module.__dict__.get("_hf_hook")
    parts = getattr(hook, "hooks", (hook,))
    within = getattr(module.__dict__.get("_old_forward"), "__func__", None)
    return within is type(module).forward and all(
        type(part).__module__.startswith("accelerate.") for part in parts
    )


def _is_from_elsewhere(kind: type, name: str) -> bool:
    """Whether the function of this name that instances of a class use is from outside transformers."""
    for base in kind.__mro__:
        if name in vars(base):
            function: Callable[..., Any] = vars(base)[name]
            modules = (base.__module__, str(getattr(function, "__module__", None)))
            return not all(one.startswith(OF_TRANSFORMERS) for one in modules)
    return False
