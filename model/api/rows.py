"""Rows of a padded batch of `generate`, each decoded by itself: what may be asked about one row without the others.

Shapes: B rows, P tokens of each prompt, padding included, n new tokens of the longest text.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

# Transformers' processors that give a row the same scores whatever the others are, and keep nothing of a call.
# By name, since not every version has them all.
PROCESSORS = frozenset(
    {
        *("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor"),
        *("RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor"),
        *("SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor"),
        *("SuppressTokensLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor"),
        *("ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor"),
        *("ExponentialDecayLengthPenalty", "InfNanRemoveLogitsProcessor", "LogitNormalization"),
        *("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TopHLogitsWarper"),
        *("MinPLogitsWarper", "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper"),
        "WatermarkLogitsProcessor",
    }
)
OF_TRANSFORMERS = "transformers.generation.logits_process"
CRITERIA = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria, MaxTimeCriteria)


def is_by_row(processor: Any) -> bool:
    """Whether a processor may be asked about each row of a batch by itself."""
    cls = type(processor)
    return cls.__module__ == OF_TRANSFORMERS and cls.__name__ in PROCESSORS


def of_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """Return the processors to ask about a row: a repetition penalty may know how much each row is padded [B]."""
    found = LogitsProcessorList()
    for processor in processors:
        num_ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(num_ignored, torch.Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = num_ignored[row : row + 1]
        found.append(processor)
    return found


def are_by_row(criteria: StoppingCriteriaList) -> bool:
    """Whether criteria may be asked about each row of a batch by itself.

    Without an end of text, transformers goes on with a row that another criterion ended until all rows have ended.
    """
    kinds = {type(one) for one in criteria}
    return kinds <= {*CRITERIA} and (EosTokenCriteria in kinds or kinds <= {MaxLengthCriteria})


def with_answers(
    input_ids: torch.Tensor, answers: Sequence[Sequence[int]], padding: int
) -> torch.Tensor:
    """Return prompts [B, P] and their answers [B, P + n]; the shorter ones are padded on the right."""
    longest = max(map(len, answers))
    rows = [[*answer, *[padding] * (longest - len(answer))] for answer in answers]
    return torch.cat((input_ids, torch.tensor(rows, device=input_ids.device)), dim=1)
