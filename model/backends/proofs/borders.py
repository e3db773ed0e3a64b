"""Lengths of a text that change what a model computes: its context, borders of rotary frequencies, scales."""

from __future__ import annotations

from typing import Any, NamedTuple

CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def rope_border(config: Any) -> int | None:
    """Return the length at which the rotary embeddings switch to other frequencies (longrope)."""
    for rope in rope_settings(config):
        if rope.get("rope_type", rope.get("type")) == "longrope":
            border = rope.get("original_max_position_embeddings")
            return border or getattr(config, "original_max_position_embeddings", None)
    return None


class KeyBorders(NamedTuple):
    """Borders that no tree may cross, of models that count keys where they mean positions.

    A tree has more keys than its sequence has tokens, so that across a border it would get the wrong scale.
    """

    # PhiMoE in transformers 4.57 takes its longrope scale from the number of keys; None: no border.
    rope: int | None
    # Llama 4 scales the queries of some layers by key index, in steps of `floor_scale`; 0: never.
    query_step: int

    @classmethod
    def of(cls, config: Any) -> KeyBorders:
        """Return the borders of a model with this text config."""
        scales_queries = getattr(config, "attn_temperature_tuning", False)
        return cls(rope_border(config), config.floor_scale if scales_queries else 0)

    def are_crossed(self, base: int, num_nodes: int) -> bool:
        """Whether a draft of up to `num_nodes` nodes after `base` cached tokens crosses one."""
        if self.rope and base < self.rope < base + num_nodes:
            return True
        step = self.query_step
        return bool(step) and (base + 1) // step != (base + num_nodes) // step


def context_limit(config: Any, prompt_length: int) -> int | None:
    """Return the most tokens (prompt and new) that this prompt may grow to; None if there is no limit.

    Dynamic and longrope position embeddings depend on the largest position of a call. A sequence that
    crosses their border would differ from plain decoding, so the border is the limit. It also holds
    for a prompt that is one token longer: the last token is read alone, so the others would be read
    below the border.
    """
    limits = [
        limit
        for name in CONTEXT_NAMES
        if isinstance(limit := getattr(config, name, None), int) and limit > 0
    ]
    # Doge drops keys beyond it, counted anew in each pass.
    window = getattr(config, "keep_window_size", None)
    limit = min([*limits[:1], *([window] if window else [])], default=None)
    border = rope_border(config)
    if border and prompt_length <= border + 1:
        return min(limit or border, border)
    return limit


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """Return the rope settings of a config: one, or one a layer type; [] if there are none."""
    settings = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return nested or ([settings] if settings else [])
