"""Settings of a checkpoint's generation config that change transformers' texts but not ours."""

from __future__ import annotations

import logging
from typing import Any

from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

# Settings that shape texts, each with its neutral value. Sampling settings are arguments here, so
# they are left out.
SHAPING: dict[str, Any] = {
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "num_beams"), 1),
    **{"min_length": 0, "min_new_tokens": 0, "no_repeat_ngram_size": 0, "repetition_penalty": 1},
    **{"bad_words_ids": [], "begin_suppress_tokens": [], "suppress_tokens": []},
    **{"sequence_bias": {}, "stop_strings": []},
    **dict.fromkeys(("exponential_decay_length_penalty", "forced_bos_token_id")),
    **dict.fromkeys(("forced_eos_token_id", "max_time", "watermarking_config")),
}


def shaping_settings(model: PreTrainedModel) -> dict[str, Any]:
    """Return the settings that shape texts of a model's `generate`, sampling settings left out."""
    config = getattr(model, "generation_config", None)
    given = {} if config is None else config.to_diff_dict()
    return {
        name: given[name]
        for name, neutral in SHAPING.items()
        if given.get(name) not in (None, neutral)
    }


def warn_of_settings(model: PreTrainedModel) -> None:
    """Warn of settings that shape texts of a model's own `generate`."""
    settings = shaping_settings(model)
    if settings:
        logger.warning(
            "generation_config: %s apply only to the model's own generate, not here; give "
            "logits_processors, or use custom_generate, which honours them",
            ", ".join(f"{name}={value}" for name, value in settings.items()),
        )
