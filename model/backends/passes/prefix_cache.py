"""The KV cache of the last sequence, kept for the next sequence with the same beginning, as in a chat.

The rows of the common prefix stay; only what follows is computed. Kept rows may come from passes of
other shapes, so they differ by rounding from those of a fresh prompt and never count as reference
rows: in float32 the first near-tie reads the whole prompt again (`ReferenceRows`),
and every token stays the same.

Shapes: T rows in use.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..proofs.support import OwnCode
from ..target import TargetModel
from .cache import TreeCache

# Attributes of peft's layers that say which adapters are active.
ADAPTER_STATE = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")

# About how many numbers of a tensor are compared to find changes.
SAMPLE = 16


class PrefixCache:
    """Holds the cache between two sequences of one model."""

    def __init__(self) -> None:
        self._cache: TreeCache | None = None
        self._tokens: Sequence[int] = ()
        self._num_rows = 0
        self._weights: Weights | None = None

    def open(self, target: TargetModel, prompt_ids: Sequence[int], capacity: int) -> TreeCache:
        """Return a cache for `capacity` rows that holds the rows of the prompt's known beginning.

        The prompt's last token is never among them: it is the first tree's root. Nothing is kept if
        the weights have changed, or if rows depend on the parts in which the sequence was read, or on its
        length and it is beyond the border (longrope).
        """
        cache, self._cache = self._cache, None  # lost if reading the prompt fails
        border = target.borders.rope
        with target.lock:  # no hooks of a pass of ours
            weights = Weights(target.model)
        is_usable = (
            weights.are_those_of(self._weights)
            and target.is_same_in_parts
            and (border is None or (self._num_rows < border and len(prompt_ids) <= border))
        )
        self._weights = weights
        if cache is None or not is_usable:
            del cache  # its rows may be used again
            return target.new_cache(capacity)
        num_known = min(self._num_rows, len(prompt_ids) - 1)
        num_common = cache.nearest(_common_length(self._tokens[:num_known], prompt_ids))
        if cache.capacity >= capacity:
            cache.keep(num_common, ())
            return cache
        larger = target.new_cache(capacity)
        larger.copy_rows(cache, num_common)
        return larger

    def store(self, cache: TreeCache, sequence: Sequence[int]) -> None:
        """Keep the cache, whose rows belong to the first tokens of `sequence`; both may go on growing."""
        if not cache.is_lasting:
            return
        self._cache = cache
        self._tokens = sequence
        self._num_rows = cache.length

    def clear(self) -> None:
        """Forget the sequence and free its rows."""
        self._cache = None
        self._tokens = ()
        self._num_rows = 0


def _common_length(known: Sequence[int], prompt_ids: Sequence[int]) -> int:
    """Return the length of the common prefix; `known` is not the longer one."""
    for index, token in enumerate(known):
        if token != prompt_ids[index]:
            return index
    return len(known)


class Weights:
    """Which tensors and code a model computes with, and how often each tensor was written.

    PyTorch counts writes, but not those through `.data` nor those to tensors made in inference
    mode. A sample of every tensor shows writes through `.data`, except to single numbers.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self.code = OwnCode.of(model)
        # A hook may do anything.
        has_hooks = bool(self.code.hooks)
        self.are_counted = not has_hooks and not any(tensor.is_inference() for tensor in tensors)
        # Weak references: replaced weights are freed, and no new tensor is taken for a freed one.
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._writes = [tensor._version for tensor in tensors if self.are_counted]
        self._samples = _samples(tensors if self.are_counted else ())
        self._adapters = active_adapters(model)

    def are_those_of(self, other: Weights | None) -> bool:
        """Whether nothing has changed since `other` was recorded."""
        return (
            other is not None
            and self.are_counted
            and (self._writes, self._adapters) == (other._writes, other._adapters)
            and self.code == other.code
            and all(
                one() is another()
                for one, another in zip(self._tensors, other._tensors, strict=True)
            )
            and self._samples.keys() == other._samples.keys()
            and all(torch.equal(one, other._samples[kind]) for kind, one in self._samples.items())
        )


def active_adapters(model: nn.Module) -> list[list[str]]:
    """Return which adapters of peft are active in each layer that has some."""
    return [
        [str(getattr(module, name, None)) for name in ADAPTER_STATE]
        for module in model.modules()
        if hasattr(module, "active_adapters")
    ]


def _samples(
    tensors: Iterable[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], torch.Tensor]:
    """Return sampled numbers of every tensor by device and dtype, so that comparing syncs each device once.

    Tensors that were freed, or are of unusual types, are left out.
    """
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        is_plain = type(tensor) in (nn.Parameter, torch.Tensor) and tensor.layout == torch.strided
        if is_plain and tensor.device.type != "meta":
            # Evenly along every dimension, whatever the layout in memory.
            count = math.ceil(SAMPLE ** (1 / max(1, tensor.ndim)))
            places = tuple(slice(None, None, max(1, size // count)) for size in tensor.shape)
            some = tensor.detach()[places].reshape(-1)
            found.setdefault((tensor.device, tensor.dtype), []).append(some)
    # As bytes: a NaN then equals itself.
    return {kind: torch.cat(parts).view(torch.uint8) for kind, parts in found.items()}
