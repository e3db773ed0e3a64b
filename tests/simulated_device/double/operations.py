"""Operations as a GPU sees them: which launch a kernel, which make the host wait, what they write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .tensor import SimulatedTensor, leaves

# They allocate or describe, and launch nothing.
FREE = {
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "is_pinned"),
    *("detach_", "unsqueeze_", "squeeze_", "transpose_", "t_", "as_strided_", "resize_", "set_"),
}
# The schema of this one does not say that it is a view.
HIDDEN_VIEWS = {"_unsafe_view"}
# The size of their result, or the result itself, is a number on the host.
WAITS = {
    *("_local_scalar_dense", "equal", "is_nonzero"),
    *("nonzero", "masked_select", "bincount", "unique_consecutive", "unique_dim", "_unique2"),
}
COPIES = {"_to_copy", "copy_"}
# Made of others on a CPU alone: a GPU has a kernel for each.
ONE_KERNEL = {"_fused_rms_norm"}
# Their indices may be on the host: they are copied first.
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Traits(NamedTuple):
    """The fixed traits of an operation.

    Attributes:
        name: without its overload.
        is_composite: whether it is made of others, which a GPU launches in its place.
        is_view: whether its result is memory of its argument.
        written: positions and names of the arguments that it writes.
    """

    name: str
    is_composite: bool
    is_view: bool
    written: tuple[tuple[int, str], ...]


def traits_of(func: Any) -> Traits:
    """Return the traits of an operation of ATen."""
    name = func.overloadpacket.__name__
    is_composite = name not in ONE_KERNEL and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )
    returned = [value.alias_info for value in func._schema.returns]
    is_view = bool(returned) and all(alias and not alias.is_write for alias in returned)
    written = tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info and argument.alias_info.is_write
    )
    return Traits(name, is_composite, is_view or name in HIDDEN_VIEWS, written)


class Operation:
    """One call of an operation.

    Attributes:
        tensors: all arguments that are tensors.
        ours: those on simulated devices.
    """

    def __init__(
        self, func: Any, traits: Traits, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.func, self.traits, self.args, self.kwargs = func, traits, args, kwargs
        self.name = traits.name
        self.tensors = [one for one in leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        self.ours = [one for one in self.tensors if isinstance(one, SimulatedTensor)]

    @property
    def indices(self) -> list[torch.Tensor]:
        """The indices of an operation in `INDEXING`."""
        return [value for value in self.args[1] if isinstance(value, torch.Tensor)]

    @property
    def launches(self) -> bool:
        """Whether it launches a kernel."""
        return not self.traits.is_view and self.name not in FREE

    @property
    def waits(self) -> bool:
        """Whether the host waits for a result of this operation."""
        if self.name == "repeat_interleave":  # without its size the device must be asked
            return self.kwargs.get("output_size") is None
        return self.name in WAITS

    @property
    def written(self) -> list[torch.Tensor]:
        """The tensors that it writes."""
        found = (
            self.args[position] if position < len(self.args) else self.kwargs.get(name)
            for position, name in self.traits.written
        )
        return [value for value in leaves(list(found)) if isinstance(value, torch.Tensor)]
