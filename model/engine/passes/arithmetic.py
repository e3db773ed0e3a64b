"""The functions that compute a model's passes: its own, or kernels swapped in for them.

Sums of kernels may round in another way. In float32 near-ties are decided by the model's own functions
(`model.engine.near_ties`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from threading import RLock
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...kernels.attention import AttentionKernels, HeadShape, attention_kernels
from ...kernels.linear import LinearKernels, linear_kernels
from ...kernels.norms import FusedNorms, fused_norms
from ...kernels.sdpa import without_cudnn
from ...machine.hardware import use_huge_pages
from ...programs.layers import LayerPrograms, layer_programs
from ..own_code import OwnCode
from ..support import UnsupportedModelError
from .hidden import layers_of
from .layer_shape import BufferShape, LayerShape

_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()

Value = TypeVar("Value")


class FoundOnce(Generic[Value]):
    """A property of a target model that is found at its first use, under the model's lock.

    `cached_property` has a lock of its own, one for all models up to Python 3.11: a thread that looks within a
    pass, and one that waits for that pass to end, would wait for each other.
    """

    def __init__(self, find: Callable[[Any], Value]) -> None:
        self._find = find
        self._name = find.__name__
        self.__doc__ = find.__doc__

    def __get__(self, target: Any, owner: type) -> Value:
        known = target.__dict__
        with target.lock:
            if self._name not in known:  # else another thread has found it
                known[self._name] = self._find(target)  # which comes before this from now on
            value: Value = known[self._name]
            return value


class PassArithmetic:
    """The part of a target model that chooses the functions of its passes.

    Attributes:
        model, config, dtype, device, layer_shapes: of the target model.
        use_kernels: whether passes may use kernels.
    """

    # Whether they are replayed as CUDA graphs of the model's own kernels: launches cost nothing then.
    is_replayed = False
    # Whether passes have other arithmetic than usual, that of `reference`.
    is_in_reference = False

    model: Any
    config: Any
    dtype: torch.dtype
    device: torch.device
    layer_shapes: Sequence[LayerShape | None]
    use_kernels: bool

    def plain_pass(self, num_tokens: int) -> Any:
        """Run a pass of the model itself over so many tokens; return its cache."""
        raise NotImplementedError

    def new_cache(self, capacity: int) -> Any:
        """Return an empty cache of passes."""
        raise NotImplementedError

    @property
    def lock(self) -> Any:
        """Serialises our passes of this model, and what looks at its modules or exchanges their functions.

        Others may run the model meanwhile: what a pass exchanges acts in its thread alone (`OwnForwards`).
        """
        return _LOCKS.get(self.model) or _LOCKS.setdefault(self.model, RLock())

    @FoundOnce
    def linear_kernels(self) -> LinearKernels:
        """The kernels of linear layers; built at the first call."""
        if not self.use_kernels:
            return LinearKernels([])
        kernels = linear_kernels(self.model, self.dtype)
        use_huge_pages(kernels.weights)
        return kernels

    @FoundOnce
    def norms(self) -> FusedNorms:
        """The norms of passes; found at the first call."""
        if not self.use_kernels:
            return FusedNorms({}, self.dtype)
        return fused_norms(self.model, self.dtype)

    @FoundOnce
    def programs(self) -> LayerPrograms:
        """The layers that passes run as programs; captured at the first call."""
        is_for_them = self.linear_kernels and self.attention
        if not is_for_them or OwnCode.of(self.model).is_on_modules:
            return LayerPrograms({}, self.dtype)
        try:
            _, layers = layers_of(self.model, self.config.num_hidden_layers)
        except UnsupportedModelError:
            return LayerPrograms({}, self.dtype)
        return layer_programs(self.model, [*layers], self.plain_pass, self.new_cache)

    @FoundOnce
    def linear_kernels_outside(self) -> LinearKernels:
        """The kernels of the linear layers that are in no program."""
        return self.linear_kernels.without(self.programs.inner)

    @FoundOnce
    def attention(self) -> AttentionKernels:
        """The attention of passes; built at the first call."""
        # Models that choose among keys do so themselves only for transformers' attention.
        chooses_keys = any(shape and shape.index_keys for shape in self.layer_shapes)
        if not self.use_kernels or not self._attention_shape or chooses_keys:
            return AttentionKernels(self.config, groups_heads=False, has_kernel=False)
        keys, values = (HeadShape(part.num_heads, part.head_dim) for part in self._attention_shape)
        return attention_kernels(self.model, (keys, values), self.is_replayed)

    @cached_property
    def _attention_shape(self) -> tuple[BufferShape, BufferShape] | None:
        """Shapes of the keys and values of the first layer with attention; None if there is none."""
        for shape in self.layer_shapes:
            if shape and shape.keys and shape.values:
                return shape.keys, shape.values
        return None

    def switch_kernels(self, use_kernels: bool) -> None:
        """Use kernels from now on, or none."""
        self.use_kernels = use_kernels
        for part in ("linear_kernels", "attention", "norms"):
            self.__dict__.pop(part, None)
        self.forget_programs()

    def forget_programs(self) -> None:
        """Capture the layers' programs anew at the next pass, since the model's code has changed."""
        for part in ("programs", "linear_kernels_outside"):
            self.__dict__.pop(part, None)

    @property
    def has_kernels(self) -> bool:
        """Whether passes compute anything by other functions than the model's."""
        return bool(self.linear_kernels or self.attention or self.norms)

    @property
    def lacks_kernels(self) -> bool:
        """Whether a CPU has no kernel of ours for passes over a few rows, though they may be used."""
        is_asked = self.use_kernels and self.device.type == "cpu"
        return is_asked and not (self.linear_kernels or self.attention)

    @property
    def kernel_names(self) -> dict[str, str]:
        """Names of the kernels in use, by what they compute."""
        return {
            "linear": self.linear_kernels.name,
            "attention": self.attention.name,
            "norms": self.norms.name,
            "layers": self.programs.name,
        }

    @contextmanager
    def kernels(self, num_rows: int, is_packed: bool = False) -> Iterator[None]:
        """Within the block the model uses the kernels for a pass over `num_rows` rows, of several texts if it
        is packed.
        """
        with (
            self.lock,
            without_cudnn(self.device),
            self.attention.exchanged(num_rows, is_packed),
            self._layers_and_linear(num_rows),
            self.norms.exchanged(),
        ):
            yield

    @contextmanager
    def _layers_and_linear(self, num_rows: int) -> Iterator[None]:
        if not self.programs.are_used(num_rows):
            with self.linear_kernels.for_rows(num_rows):
                yield
            return
        with self.programs.exchanged(), self.linear_kernels_outside.for_rows(num_rows):
            yield

    def is_reference(self, num_rows: int) -> bool:
        """Whether a prompt chunk of this length, or a single row, has reference arithmetic anyway."""
        return (
            self.attention.is_reference
            and self.norms.is_reference
            and self.programs.is_reference(num_rows)
            and self.linear_kernels.is_reference(num_rows)
        )

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within the block prompts and single rows have reference arithmetic: plain decoding's, bit for bit.

        Passes of other threads wait for its end.
        """
        with (
            self.lock,
            self.linear_kernels.reference(),
            self.linear_kernels_outside.reference(),
            self.programs.reference(),
            self.attention.reference(),
            self.norms.reference(),
        ):
            self.is_in_reference = self.has_kernels
            try:
                yield
            finally:
                self.is_in_reference = False
