"""A call of `generate` as transformers hands it to a callable.

Shapes: P tokens of the prompt, padding included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from .prompts import num_padding


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call of `generate` as transformers hands it to a callable.

    Attributes:
        model: the model whose `generate` calls.
        input_ids: int64 [1, P], or more rows, which are refused.
        processors: of logits.
        config: the generation config of the call: the model's own and what the call gives.
        arguments: all other arguments.
        given: the names that the call itself gives, as far as they can be known.
    """

    model: PreTrainedModel
    input_ids: torch.Tensor
    processors: LogitsProcessorList
    config: GenerationConfig
    arguments: Mapping[str, Any]
    given: frozenset[str] = field(default=frozenset())

    def value(self, name: str) -> Any:
        """Return the value of an argument; None if there is none."""
        if name == "input_ids":
            return self.input_ids
        if name in self.arguments:
            return self.arguments[name]
        return getattr(self.config, name, None)

    @property
    def num_padding(self) -> int:
        """The tokens before the text that the mask leaves out. Raises ValueError for any other mask."""
        mask = self.arguments.get("attention_mask")
        return 0 if mask is None else num_padding(mask[0].tolist(), self.input_ids.shape[1])

    @property
    def has_usual_positions(self) -> bool:
        """Whether `position_ids` count from the first token that is seen."""
        seen = self.arguments["position_ids"][0, self.num_padding :].tolist()
        return bool(seen == list(range(len(seen))))

    def origin(self, name: str) -> str:
        """Say where a setting comes from if not from the call's own arguments; else nothing."""
        of_model = getattr(getattr(self.model, "generation_config", None), name, None)
        if name in self.given or of_model is None or self.value(name) != of_model:
            return ""
        return " (from the model's generation_config, not from the call)"
