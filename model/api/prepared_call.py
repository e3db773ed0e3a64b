"""A call of `generate` as transformers hands it to a callable, and what the decoding loop takes of it.

Shapes: B prompts, P tokens of each, padding included, n new tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput

from ..engine.rules import GreedyRule, SamplingRule, TokenRule
from ..engine.sequence import Request
from .prompts import num_padding

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
# Rows [1, V] by length of the text.
Kept: TypeAlias = dict[int, torch.Tensor] | None


@dataclass
class PreparedCall:
    """A call of `generate` as transformers hands it to a callable."""

    model: PreTrainedModel
    input_ids: torch.Tensor  # int64 [B, P]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList  # all that may end a text
    config: GenerationConfig  # of the call: the model's own and what the call gives
    arguments: Mapping[str, Any]  # all others
    given: frozenset[str]  # names that the call itself gives, as far as they can be known

    def __post_init__(self) -> None:
        is_asked = bool(self.config.return_dict_in_generate)
        # Of each new token, if they are asked for. By length of the text: at a near-tie the second answer
        # replaces the first.
        self._scores: Kept = {} if is_asked and self.config.output_scores else None
        self._logits: Kept = {} if is_asked and self.config.output_logits else None

    def value(self, name: str) -> Any:
        """Return the value of an argument; None if there is none."""
        prepared = {
            "input_ids": self.input_ids,
            "logits_processor": self.processors,
            "stopping_criteria": self.criteria,
        }
        return {**self.arguments, **prepared}.get(name, getattr(self.config, name, None))

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
    def padding_token(self) -> int | None:
        """The token that fills up texts which are shorter than others; None if there is none."""
        if self.config.pad_token_id is not None:
            return int(self.config.pad_token_id)
        return next(iter(self._ends()), None)

    def origin(self, name: str) -> str:
        """Say where a setting comes from if not from the call's own arguments; else nothing."""
        of_model = getattr(getattr(self.model, "generation_config", None), name, None)
        if name in self.given or of_model is None or self.value(name) != of_model:
            return ""
        return " (from the model's generation_config, not from the call)"

    def requests(self) -> list[Request]:
        """Return what is asked for in each row, whose padding processors and criteria see too."""
        limits = [one.max_length for one in self.criteria if type(one) is MaxLengthCriteria]
        if not limits:
            raise ValueError("max_new_tokens: got none; allowed: 1 or more")
        limit, ends = int(min(limits)) - self.input_ids.shape[1], frozenset(self._ends())
        requests = []
        for index, (row, num) in enumerate(zip(self.input_ids, self.padding, strict=True)):
            rule, stop = self._rule(index, row[None, :num]), self._stop(row[:num])
            requests.append(Request(row[num:].tolist(), limit, ends, rule, stop))
        return requests

    def output(self, answers: Sequence[Sequence[int]]) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Return what `generate` returns: int64 [B, P + n], padded on the right, or an output that holds it."""
        longest, padding = max(map(len, answers)), self.padding_token or 0  # one prompt needs none
        rows = [[*answer, *[padding] * (longest - len(answer))] for answer in answers]
        rest = torch.tensor(rows, device=self.input_ids.device)
        sequences = torch.cat((self.input_ids, rest), dim=1)
        if not self.config.return_dict_in_generate:
            return sequences
        scores, logits = _in_order(self._scores), _in_order(self._logits)
        return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits)

    def _ends(self) -> list[int]:
        """Return the tokens that end a text."""
        ends = [one.eos_token_id for one in self.criteria if type(one) is EosTokenCriteria]
        return [token for ids in ends for token in ids.flatten().tolist()]

    def _rule(self, index: int, padding: torch.Tensor) -> TokenRule | None:
        """Return the rule that chooses a row's tokens after its padding [1, ...]; None for argmax."""
        processors, do_sample = self._processors_of(index), self.config.do_sample
        if not do_sample and not processors and self._scores is None and self._logits is None:
            return None

        def process(input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            # On the device of transformers' inputs, which need not be the model's.
            input_ids = torch.cat((padding, input_ids.to(padding.device)), dim=1)
            logits = logits.to(padding.device)
            scores: torch.Tensor = processors(input_ids, logits)
            for kept, values in ((self._scores, scores), (self._logits, logits)):
                if kept is not None:
                    kept[input_ids.shape[1]] = values
            return scores

        return SamplingRule([process]) if do_sample else GreedyRule([process])

    def _processors_of(self, index: int) -> LogitsProcessorList:
        """Return the processors to ask about a row: a repetition penalty may know each row's padding [B]."""
        found = LogitsProcessorList()
        for processor in self.processors:
            num_ignored = getattr(processor, "prompt_ignore_length", None)
            if isinstance(num_ignored, torch.Tensor):
                processor = copy.copy(processor)
                processor.prompt_ignore_length = num_ignored[index : index + 1]
            found.append(processor)
        return found

    def _stop(self, padding: torch.Tensor) -> Callable[[Sequence[int]], bool] | None:
        """Return a function that asks about a text the criteria that the loop does not know."""
        known = (MaxLengthCriteria, EosTokenCriteria)
        asked = StoppingCriteriaList(one for one in self.criteria if type(one) not in known)
        if not asked:
            return None
        before = padding.tolist()

        def stop(text: Sequence[int]) -> bool:
            input_ids = torch.tensor([[*before, *text]], device=padding.device)
            return bool(asked(input_ids, _in_order(self._scores)).all())

        return stop


def _in_order(kept: Kept) -> tuple[torch.Tensor, ...] | None:
    return None if kept is None else tuple(kept.values())


def is_by_row(processor: Any) -> bool:
    """Whether a processor may be asked about each row of a batch by itself."""
    cls = type(processor)
    return cls.__module__ == OF_TRANSFORMERS and cls.__name__ in PROCESSORS


def are_by_row(criteria: StoppingCriteriaList) -> bool:
    """Whether criteria may be asked about each row of a batch by itself."""
    # Without an end of text, transformers goes on with a row that another criterion ended until all have ended.
    kinds = {type(one) for one in criteria}
    return kinds <= {*CRITERIA} and (EosTokenCriteria in kinds or kinds <= {MaxLengthCriteria})
