"""Masks of trees, as stock Hugging Face models take them: additive, one for each kind of layer.

Shapes: N nodes, T keys.
"""

from __future__ import annotations

from typing import Any

import torch

from .tree import TreeTopology

Masks = torch.Tensor | dict[str, torch.Tensor]


class TreeMasks:
    """The masks that a model takes.

    Args:
        config: the model's, of its text part.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self._layer_types = sorted(set(getattr(config, "layer_types", None) or ()))
        has_window = bool(getattr(config, "sliding_window", None))
        self._kinds = self._layer_types or ["sliding_attention" if has_window else "full_attention"]

    def of_tree(
        self, topology: TreeTopology, base: int, device: torch.device, dtype: torch.dtype
    ) -> Masks:
        """Return the mask(s) [1, 1, N, base + N] of a tree after `base` cached tokens."""
        tree = topology.additive_mask(device, dtype)  # [N, N]
        full = torch.nn.functional.pad(tree, (base, 0))
        depths = keys = topology.depth_tensor(device) + base
        if self._kinds != ["full_attention"]:  # which does not ask where its keys stand
            keys = torch.cat((torch.arange(base, device=device), depths))
        return self.by_layer_type(full, depths, keys)

    def by_layer_type(
        self, full: torch.Tensor, query_positions: torch.Tensor, key_positions: torch.Tensor
    ) -> Masks:
        """Return the model's mask(s) for one [N, T] that knows no window: [1, 1, N, T], or a dict of such by
        layer type.

        Windows are by position [N] and [T], since a tree's row index is no position.
        """
        masks = {
            kind: self._limit(full, kind, query_positions[:, None], key_positions)[None, None]
            for kind in self._kinds
        }
        return masks if self._layer_types else masks[self._kinds[0]]

    def _limit(
        self, mask: torch.Tensor, kind: str, queries: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """Block the keys that a layer type does not see."""
        if kind == "full_attention":
            return mask
        if kind == "chunked_attention":
            size = self._config.attention_chunk_size
            blocked = keys // size != queries // size
        else:
            blocked = keys <= queries - self._config.sliding_window
        return mask.masked_fill(blocked, torch.finfo(mask.dtype).min)
