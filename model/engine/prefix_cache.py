"""The KV cache of the last text, kept for a next one that begins alike: turns of a chat.

A prompt that repeats what was read or written before is not read again: the rows of the common
prefix stay, whatever follows is computed. Rows that other shapes of passes computed differ by
rounding from those of a fresh prompt, so that nothing here counts as plain: in float32 the first
near-tie reads the whole prompt again (see `model.engine.loop`), and the tokens stay equal to the last
one.

Shapes: T rows in use.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from .cache import TreeCache
from .support import rope_border
from .target import TargetModel

# What peft's layers say about the adapters that take part.
ADAPTER_STATE = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")


# Numbers of a tensor that are compared to find out whether it was changed, about.
SAMPLE = 16


class PrefixCache:
    """Owns the cache between two texts of one model."""

    def __init__(self) -> None:
        self._cache: TreeCache | None = None
        self._text: Sequence[int] = ()
        self._num_rows = 0
        self._weights: _Weights | None = None

    def open(self, target: TargetModel, prompt_ids: Sequence[int], capacity: int) -> TreeCache:
        """Return a cache for `capacity` rows that holds those of the prompt's known beginning.

        The prompt's last token is never among them: it is the first tree's root. Nothing is kept
        where the weights have changed meanwhile, or where rows depend on the length of the text
        (longrope).
        """
        cache, self._cache = self._cache, None  # lost if reading the prompt fails
        weights = _Weights(target.model)
        is_usable = weights.are_those_of(self._weights) and not rope_border(target.config)
        self._weights = weights
        if cache is None or not is_usable:
            return target.new_cache(capacity)
        num_known = min(self._num_rows, len(prompt_ids) - 1)
        num_common = _common_length(self._text[:num_known], prompt_ids)
        if cache.capacity >= capacity:
            cache.keep(num_common, ())
            return cache
        larger = target.new_cache(capacity)
        larger.copy_rows(cache, num_common)
        return larger

    def store(self, cache: TreeCache, text: Sequence[int]) -> None:
        """Take the cache whose rows belong to the first tokens of `text`; both may go on growing."""
        if type(cache) is not TreeCache:
            return  # others share their rows with every text of their target
        self._cache = cache
        self._text = text
        self._num_rows = cache.length

    def clear(self) -> None:
        """Forget the text and free its rows."""
        self._cache = None
        self._text = ()
        self._num_rows = 0


def _common_length(known: Sequence[int], prompt_ids: Sequence[int]) -> int:
    """Return how many first tokens two texts share; `known` is not the longer one."""
    for index, token in enumerate(known):
        if token != prompt_ids[index]:
            return index
    return len(known)


class _Weights:
    """Which tensors a model computes with, and how often each was written.

    PyTorch counts the writes, except those through `.data`, which a sample of every tensor shows unless they
    are to single numbers, and to tensors made in inference mode.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        # What a hook does, nobody knows.
        self.are_counted = not any(tensor.is_inference() for tensor in tensors) and not any(
            map(_has_hooks, model.modules())
        )
        # Weak: exchanged weights are not kept alive, and no new tensor passes for a dead one.
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._writes = [tensor._version for tensor in tensors if self.are_counted]
        self._samples = _samples(tensors if self.are_counted else ())
        self._adapters = [
            [str(getattr(module, name, None)) for name in ADAPTER_STATE]
            for module in model.modules()
            if hasattr(module, "active_adapters")
        ]

    def are_those_of(self, other: _Weights | None) -> bool:
        """Whether nothing changed between two moments."""
        return (
            other is not None
            and self.are_counted
            and (self._writes, self._adapters) == (other._writes, other._adapters)
            and all(
                one() is another()
                for one, another in zip(self._tensors, other._tensors, strict=True)
            )
            and self._samples.keys() == other._samples.keys()
            and all(torch.equal(one, other._samples[kind]) for kind, one in self._samples.items())
        )


def _has_hooks(module: nn.Module) -> bool:
    """Whether others than transformers, which collects outputs by them, have hooks on a module."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not str(hook.__module__).startswith("transformers.") for hook in hooks)


def _samples(
    tensors: Iterable[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], torch.Tensor]:
    """Return some numbers of every tensor, by place and type: one comparison waits for a device once.

    None of those that are not there, or of a kind of their own.
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
    # As bytes: what is no number equals itself.
    return {kind: torch.cat(parts).view(torch.uint8) for kind, parts in found.items()}
