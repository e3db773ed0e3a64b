"""The layout of a model's cache, found by two plain passes: shapes of rows, states, and who reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from ...kernels.linear import stored
from ..proofs.support import UnsupportedModelError, forward_parameters, new_cache
from ..states.layers import (
    CONTAINERS,
    REPLACED,
    Container,
    SequenceStates,
    State,
    first_states,
    has_read_states,
    num_state_bytes,
    num_states_of,
    own_cache_class,
    own_cache_rows,
)
from ..states.mixers import Mixers, find_mixers
from .cache import BufferShape, LayerShape, TreeCache


class CacheLayout:
    """The layout of a model's cache.

    Attributes (once probed):
        shapes: shapes of each layer's cache; None for layers that read another layer's cache, or keep
            nothing.
        mixers: the modules that keep states; None for attention alone.
        num_state_bytes: memory of the states of one sequence; 0 for attention alone.
        vocab_size: logits of a pass V.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._own = own_cache_class(model)
        self._parameters = forward_parameters(model)
        self._first_states: dict[int, State] = {}  # before any token, of such a class

    def probe(self, run: Callable[..., torch.Tensor]) -> None:
        """Find the layout by plain passes, which the caller serialises; `run` is `TargetModel.run`.

        Raises:
            UnsupportedModelError: if a plain pass with a cache fails or fills none, or states are read in
                an unknown way.
        """
        name = f"model type {self._model.config.get_text_config(decoder=True).model_type}"
        mixers: dict[int, Any] = {}
        try:
            cache, logits = self.plain_pass(run)
            self._read_shapes(cache)
            if any(shape and shape.num_states for shape in self.shapes):
                mixers = self._mixers(cache, run)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else ""
            raise UnsupportedModelError(
                f"{name}: a plain forward pass with a cache fails: {type(error).__name__}: {reason}"
            ) from error
        if not any(self.shapes):
            raise UnsupportedModelError(f"{name}: does not fill a cache")
        with_states = {index for index, one in enumerate(self.shapes) if one and one.num_states}
        if with_states != set(mixers):
            raise UnsupportedModelError(
                f"{name}: keeps recurrent state that its modules read in an unknown way"
            )
        self.mixers = Mixers(mixers) if mixers else None
        self.vocab_size = logits.shape[-1]

    def new_cache(self, capacity: int) -> TreeCache:
        """Return an empty cache of this layout; models with a cache class of their own ask for it."""
        own, others = self._own, list[Any]()
        if own is None:
            return TreeCache(self.shapes, capacity)
        if issubclass(own, Cache):  # MiniMax's
            base: type[TreeCache] = LinearCache
        else:
            base, others = OwnStatesCache, [new_cache(self._model), self._first_states]
        cache: TreeCache = type("TreeCache", (base, own), {})(self.shapes, capacity, *others)
        return cache

    @property
    def wants_positions(self) -> bool:
        """Whether the model asks for `cache_position`: one with its own cache class, in transformers 4.57."""
        return self._own is not None and "cache_position" in self._parameters

    def cache_position(self, base: int, num_rows: int) -> torch.Tensor:
        """Return the positions of a pass's rows for models that want them."""
        device = stored(self._model.get_input_embeddings()).device
        if "cache_params" not in self._parameters:
            return torch.arange(base, base + num_rows, device=device)
        # Models with states alone know a prompt by as many positions as their convolution sees.
        first = [base] if base else range(self._model.config.conv_kernel)
        return torch.tensor(first, device=device)

    @torch.no_grad()
    def plain_pass(
        self, run: Callable[..., torch.Tensor], num_tokens: int = 2, **options: Any
    ) -> tuple[Any, torch.Tensor]:
        """Run a pass over some tokens, with more options of `run`; return the model's own cache and the logits."""
        cache = new_cache(self._model)
        return cache, run(_tokens(self._model, num_tokens), 0, cache, None, **options)

    def _read_shapes(self, cache: Any) -> None:
        """Take the shapes of a cache that `plain_pass` has filled."""
        config = self._model.config.get_text_config(decoder=True)
        is_own = not isinstance(cache, Cache)
        num_layers = config.num_hidden_layers if is_own else len(cache)
        self.shapes = [_layer_shape(cache, index) for index in range(num_layers)]
        self.num_state_bytes = num_state_bytes(cache)
        if is_own:
            self._first_states = first_states(cache, num_layers)

    def _mixers(self, cache: Any, run: Callable[..., torch.Tensor]) -> dict[int, Any]:
        """Return the modules that read states, by layer, found by watching a pass."""
        token_ids = _tokens(self._model)
        if not isinstance(cache, Cache):  # watched in ours
            cache = self.new_cache(len(token_ids) + 1)
            run(token_ids, 0, cache, None)
        return find_mixers(self._model, cache, partial(run, token_ids[:1], 2, cache, None))


class LinearCache(TreeCache):
    """The `TreeCache` of MiniMax, whose layers know no other way to keep a state."""

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self.states.layers[layer_idx].linear

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.states.layers[layer_idx].linear = linear_cache


class OwnStatesCache(TreeCache):
    """The `TreeCache` of a model that keeps its states in a class of its own (`model.backends.states.layers`).

    Args:
        layer_shapes, capacity: as `TreeCache`.
        empty: an empty cache of the model's class.
        states: those before any token, by layer and name.
    """

    def __init__(
        self,
        layer_shapes: Sequence[LayerShape | None],
        capacity: int,
        empty: Any,
        states: Mapping[int, State],
    ) -> None:
        super().__init__(layer_shapes, capacity)
        self.__dict__.update(
            {name: value for name, value in vars(empty).items() if name not in REPLACED}
        )
        self.states = SequenceStates(self.layers, states)
        for name in CONTAINERS:
            setattr(self, name, Container(self.layers, name))

    @property
    def has_previous_state(self) -> bool:
        """Whether a token was read before; all states of a draft tree's nodes are read as if there were."""
        return self.states.is_branching or self.states.num_read > 0

    @has_previous_state.setter
    def has_previous_state(self, value: bool) -> None:
        """Ignore the value: the cache counts what was read."""


def _tokens(model: PreTrainedModel, count: int = 2) -> torch.Tensor:
    weight = stored(model.get_input_embeddings())
    return torch.arange(count, device=weight.device) % len(weight)


def _layer_shape(cache: Any, index: int) -> LayerShape | None:
    """Return the shapes of a layer of a filled cache; None if the model did not write to it."""
    layers = getattr(cache, "layers", ())
    layer = layers[index] if index < len(layers) else None
    parts = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
    if not isinstance(cache, Cache):
        names = ("key_cache", "value_cache")
        parts = [*(own_cache_rows(cache, name, index) for name in names), None]
    keys, values, index_keys = (
        None
        if part is None or part.numel() == 0
        else BufferShape(
            part.shape[1] if part.ndim == 4 else 1, part.shape[-1], part.dtype, part.device
        )
        for part in parts
    )
    num_states = (
        num_states_of(layer) or _has_linear_cache(cache, index) or has_read_states(cache, index)
    )
    shape = LayerShape(keys, values, index_keys, num_states)
    return shape if shape.buffers or num_states else None


def _has_linear_cache(cache: Any, index: int) -> int:
    """Return how many states a layer of MiniMax's keeps, 0 or 1."""
    states = getattr(cache, "linear_cache", ())
    return int(index < len(states) and isinstance(states[index], torch.Tensor))
