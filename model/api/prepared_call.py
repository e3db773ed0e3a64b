"""A call of `generate` as transformers hands it to a callable.

Shapes: B prompts, P tokens of each, padding included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from .prompts import num_padding


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call of `generate` as transformers hands it to a callable.

    Attributes:
        model: the model whose `generate` calls.
        input_ids: int64 [B, P].
        processors: of logits.
        criteria: all that may end a text.
        config: the generation config of the call: the model's own and what the call gives.
        arguments: all other arguments.
        given: the names that the call itself gives, as far as they can be known.
    """

    model: PreTrainedModel
    input_ids: torch.Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    arguments: Mapping[str, Any]
    given: frozenset[str] = field(default=frozenset())

    def value(self, name: str) -> Any:
        """Return the value of an argument; None if there is none."""
        own = {
            "input_ids": self.input_ids,
            "logits_processor": self.processors,
            "stopping_criteria": self.criteria,
        }
        if name in own:
            return own[name]
        if name in self.arguments:
            return self.arguments[name]
        return getattr(self.config, name, None)

    @property
    def num_prompts(self) -> int:
        """Rows of the batch B."""
        return int(self.input_ids.shape[0])

    @property
    def padding(self) -> list[int]:
        """The tokens before each text that the mask leaves out, [B]. Raises ValueError for any other mask."""
        mask = self.arguments.get("attention_mask")
        if mask is None:
            return [0] * self.num_prompts
        return [num_padding(row, self.input_ids.shape[1]) for row in mask.tolist()]

    @property
    def has_usual_positions(self) -> bool:
        """Whether `position_ids` count from the first token of each text that is seen."""
        rows = self.arguments["position_ids"].tolist()
        seen = [row[num:] for row, num in zip(rows, self.padding, strict=True)]
        return all(row == list(range(len(row))) for row in seen)

    def origin(self, name: str) -> str:
        """Say where a setting comes from if not from the call's own arguments; else nothing."""
        of_model = getattr(getattr(self.model, "generation_config", None), name, None)
        if name in self.given or of_model is None or self.value(name) != of_model:
            return ""
        return " (from the model's generation_config, not from the call)"
