"""A tiny random model of one family, built from a config.

Weights have a large spread, so that logits differ clearly and a wrong mask or position shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
IS_VERSION_4 = VERSION < (5, 0)
VOCAB = 67
# Large enough that close logits are rare, small enough that attention is not an argmax.
WEIGHT_STD = 0.3

# Names that most configs share; a family overrides or ignores them.
BASE: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # Tied embeddings make a random model repeat its input.
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Family:
    """A model family, and how the engine supports it.

    Attributes:
        name: its name in tests and docs.
        config: name of the config class in transformers.
        options: overrides of `BASE`.
        outcome: "trees", "chains" or "refused".
        reason: regular expression for the reason given when the outcome is not "trees".
        outcome_in_4: the outcome in transformers 4.57, where it differs; "absent" if 4.57 lacks it.
        without: names of `BASE` that this config does not take.
        note: what is unusual about it, for the docs.
        right_since: the minor version of transformers 5 since which its own passes are right; older
            ones, 4.57 too, are refused.
    """

    name: str
    config: str
    options: Mapping[str, Any] = field(default_factory=dict)
    outcome: str = "trees"
    reason: str = ""
    outcome_in_4: str = ""
    without: tuple[str, ...] = ()
    note: str = ""
    right_since: int = 0

    @property
    def expected(self) -> str:
        """The outcome in the installed version of transformers."""
        return (IS_VERSION_4 and self.outcome_in_4) or self.outcome

    @property
    def is_broken(self) -> bool:
        """Whether passes of the installed version of transformers over a text are wrong."""
        return bool(self.right_since) and (5, self.right_since) > VERSION

    @property
    def is_known(self) -> bool:
        """Whether the installed transformers has this family."""
        return hasattr(transformers, self.config)

    @torch.inference_mode(mode=False)
    def build(self, seed: int = 0) -> PreTrainedModel:
        """Return a tiny random model, the same for the same seed, which others may train."""
        options = {key: BASE[key] for key in BASE if key not in self.without} | dict(self.options)
        config = getattr(transformers, self.config)(**options)
        auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        torch.manual_seed(seed)
        model = auto_class.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, WEIGHT_STD)
        model.generation_config.pad_token_id = 0
        model.generation_config.eos_token_id = None
        model.generation_config.bos_token_id = None
        return model
