"""Masks of trees, as stock Hugging Face models take them: additive, one for each kind of layer.

Shapes: N nodes, T keys.
"""

from __future__ import annotations

from typing import Any

import torch

from ...engine.tree import TreeTopology

Masks = torch.Tensor | dict[str, torch.Tensor | None]

# Layer types that see all earlier keys, or choose among them themselves.
UNLIMITED = ("full_attention", "indexed_attention", "deepseek_sparse_attention")
# Settings of a config that limit what its layers see.
WINDOWS = ("sliding_window", "attention_chunk_size")
WITH_MASK = (*UNLIMITED, "sliding_attention", "chunked_attention")


# A GPU's attention kernels take masks whose rows begin at multiples of this many numbers, and else copy
# the mask in every layer.
ROW_STEP = 8


class TreeMasks:
    """The masks that a model takes.

    Args:
        config: the model's, of its text part.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        layer_types = set(getattr(config, "layer_types", None) or ())
        has_window = bool(getattr(config, "sliding_window", None))
        self._kinds = sorted(layer_types.intersection(WITH_MASK)) or [
            "sliding_attention" if has_window else "full_attention"
        ]
        self._without_mask = sorted(layer_types.difference(WITH_MASK))
        # Models with one kind of attention beside other layers take its mask, and give it to whom it is for.
        is_one_of_several = bool(self._without_mask) and self._kinds == ["full_attention"]
        self._is_by_layer_type = bool(layer_types) and not is_one_of_several

    def of_tree(
        self, topology: TreeTopology, base: int, device: torch.device, dtype: torch.dtype
    ) -> Masks:
        """Return the mask(s) [1, 1, N, base + N] of a tree after `base` cached tokens."""
        tree = topology.additive_mask(device, dtype)  # [N, N]
        num_keys = base + topology.num_nodes
        room = -num_keys % ROW_STEP if device.type == "cuda" else 0
        full = torch.nn.functional.pad(tree, (base, room))[:, :num_keys]
        depths = keys = topology.depth_tensor(device) + base
        if self._kinds != ["full_attention"]:  # which does not ask where its keys stand
            keys = torch.cat((torch.arange(base, device=device), depths))
        return self.by_layer_type(full, depths, keys)

    @property
    def has_windows(self) -> bool:
        """Whether a layer may not see all earlier tokens."""
        return any(kind not in UNLIMITED for kind in self._kinds)

    def by_layer_type(
        self, full: torch.Tensor, query_positions: torch.Tensor, key_positions: torch.Tensor
    ) -> Masks:
        """Return the model's mask(s) for one [N, T] that knows no window: [1, 1, N, T], or a dict of such by
        layer type; [B, 1, N, T] for one of several sequences, [B, N, T].

        Windows are by position [N] and [T], since a tree's row index is no position; [N, T] where rows have
        keys of their own. For several sequences they are [B, N] and [B, 1, T].
        """
        masks = {
            kind: _of_all_heads(self._limit(full, kind, query_positions[..., None], key_positions))
            for kind in self._kinds
        }
        if not self._is_by_layer_type:
            return masks[self._kinds[0]]
        return {**masks, **dict.fromkeys(self._without_mask)}

    def _limit(
        self, mask: torch.Tensor, kind: str, queries: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """Block the keys that a layer type does not see."""
        if kind in UNLIMITED:
            return mask
        if kind == "chunked_attention":
            size = self._config.attention_chunk_size
            blocked = keys // size != queries // size
        else:
            blocked = keys <= queries - self._config.sliding_window
        return mask.masked_fill(blocked, torch.finfo(mask.dtype).min)


def _of_all_heads(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask [N, T] as [1, 1, N, T], and [B, N, T] as [B, 1, N, T]."""
    return mask[None, None] if mask.ndim == 2 else mask[:, None]
