"""What transformers prepares for a callable, as the decoding loop takes it: limits, rule, stop.

Shapes: B prompts, P tokens of each, padding included, n new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from ..engine.request import Request
from ..engine.rules import GreedyRule, SamplingRule, TokenRule, as_in_transformers
from .prepared_call import PreparedCall
from .rows import of_row


class Record:
    """The logits and scores of every new token, if they were asked for."""

    def __init__(self, config: GenerationConfig) -> None:
        is_asked = bool(config.return_dict_in_generate)
        self._keeps_scores = is_asked and bool(config.output_scores)
        self._keeps_logits = is_asked and bool(config.output_logits)
        # By length of the text: at a near-tie the second answer replaces the first.
        self._scores: dict[int, torch.Tensor] = {}
        self._logits: dict[int, torch.Tensor] = {}

    @property
    def is_needed(self) -> bool:
        """Whether any were asked for."""
        return self._keeps_scores or self._keeps_logits

    @property
    def scores(self) -> tuple[torch.Tensor, ...] | None:
        """Scores after processors [1, V] in the order of the new tokens; None if not asked for."""
        return tuple(self._scores.values()) if self._keeps_scores else None

    @property
    def logits(self) -> tuple[torch.Tensor, ...] | None:
        """Logits [1, V] in the order of the new tokens; None if not asked for."""
        return tuple(self._logits.values()) if self._keeps_logits else None

    def keep(self, length: int, logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Note logits and scores of the token after `length` tokens."""
        if self._keeps_scores:
            self._scores[length] = scores
        if self._keeps_logits:
            self._logits[length] = logits


def max_length(criteria: StoppingCriteriaList) -> int:
    """Return the most tokens of prompt and answer together.

    Raises:
        ValueError: if there is no limit.
    """
    limits = [one.max_length for one in criteria if type(one) is MaxLengthCriteria]
    if not limits:
        raise ValueError("max_new_tokens: got none; allowed: 1 or more")
    return int(min(limits))


def eos_ids(criteria: StoppingCriteriaList) -> frozenset[int]:
    """Return the tokens that end the text."""
    ends = [one.eos_token_id for one in criteria if type(one) is EosTokenCriteria]
    return frozenset(token for ids in ends for token in ids.flatten().tolist())


def criteria_to_ask(criteria: StoppingCriteriaList) -> StoppingCriteriaList:
    """Return the criteria other than lengths and ends of text, which the loop knows."""
    known = (MaxLengthCriteria, EosTokenCriteria)
    return StoppingCriteriaList(one for one in criteria if type(one) not in known)


def token_rule(
    processors: LogitsProcessorList,
    config: GenerationConfig,
    padding: torch.Tensor,
    record: Record,
) -> TokenRule | None:
    """Return the rule that chooses tokens; None for argmax.

    Processors see the padding [1, ...] too, as in transformers.
    """
    if not config.do_sample and not processors and not record.is_needed:
        return None

    def process(input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        # On the device of transformers' inputs, which need not be the model's.
        input_ids = torch.cat((padding, input_ids.to(padding.device)), dim=1)
        logits = logits.to(padding.device)
        scores: torch.Tensor = processors(input_ids, logits)
        record.keep(input_ids.shape[1], logits, scores)
        return scores

    return SamplingRule([process]) if config.do_sample else GreedyRule([process])


def stop_of(
    criteria: StoppingCriteriaList, padding: list[int], device: torch.device, record: Record
) -> Callable[[Sequence[int]], bool] | None:
    """Return a function that asks the criteria about a text; None if there are none."""
    if not criteria:
        return None

    def stop(text: Sequence[int]) -> bool:
        with as_in_transformers():
            input_ids = torch.tensor([[*padding, *text]], device=device)
            return bool(criteria(input_ids, record.scores).all())

    return stop


def padding_token(call: PreparedCall) -> int | None:
    """Return the token that fills up texts which are shorter than others; None if there is none."""
    if call.config.pad_token_id is not None:
        return int(call.config.pad_token_id)
    ends = [one.eos_token_id for one in call.criteria if type(one) is EosTokenCriteria]
    return int(ends[0].flatten()[0]) if ends else None


def row_requests(call: PreparedCall, record: Record) -> list[Request]:
    """Return what a call asks for in each of B rows, whose padding processors and criteria see too."""
    limit, ends = max_length(call.criteria) - call.input_ids.shape[1], eos_ids(call.criteria)
    asked = criteria_to_ask(call.criteria)
    requests = []
    for index, (row, num_padding) in enumerate(zip(call.input_ids, call.padding, strict=True)):
        padding, processors = row[:num_padding], of_row(call.processors, index)
        rule = token_rule(processors, call.config, padding[None], record)
        stop = stop_of(asked, padding.tolist(), row.device, record)
        requests.append(Request(row[num_padding:].tolist(), limit, ends, rule, stop))
    return requests
