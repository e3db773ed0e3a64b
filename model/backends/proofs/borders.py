"""Lengths of a text that change what a model computes: its context, borders of rotary frequencies, scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...engine.budget import MAX_DRAFT
from .support import PREPARE, UnsupportedModelError, cache_argument, new_cache, uncompiled

CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
# Setting of rotary embeddings whose model also scales queries by position (Ministral 3).
SCALED_BY_POSITION = "llama_4_scaling_beta"


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
