"""Rules: how the token after a node is chosen.

Shapes: V vocabulary, P tokens of a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from ..machine.hardware import uploaded
from .read_out import tie_gap

# They read no prefix, so that the whole sequence need not go to the device for every token.
WITHOUT_PREFIX = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
# They count their calls, and in float32 a near-tie asks twice about one token.
STATEFUL = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


# Takes token ids [1, P] and scores [1, V] to scores [1, V], as transformers' `LogitsProcessor`.
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class GreedyRule:
    """Takes the token with the largest score after processors such as penalties or forbidden tokens.

    At a near-tie (see `verify`) it takes none, and is asked again with reference logits.

    Args:
        processors: applied in order, at every node to its true prefix.
    """

    def __init__(self, processors: Sequence[Processor]) -> None:
        self.processors = tuple(processors)

    def choose(
        self, logits: torch.Tensor, prefix: Sequence[int], tie_margin: float = 0.0
    ) -> int | None:
        """Return the first of the likeliest tokens for `logits` [V] after a true prefix; None at a near-tie."""
        scores = _processed(self.processors, logits, prefix)[0]  # [V]
        if tie_margin:
            largest, *others = scores.topk(min(2, len(scores))).values.tolist()
            # The largest processed score may be small; the noise is that of the logits.
            gap = max(tie_gap(largest, tie_margin), tie_gap(float(logits.max()), tie_margin))
            if others and largest - others[0] < gap:
                return None
        return int(scores.argmax())


class SamplingRule:
    """One draw per emitted token from the processed distribution.

    One draw for each emitted token, in order, so that plain decoding and every method use the
    generator alike and produce the same sequence.

    Args:
        processors: such as transformers' temperature, top-k and top-p warpers, applied in order.
        generator: source of randomness; None uses torch's global one.
    """

    def __init__(
        self, processors: Sequence[Processor], generator: torch.Generator | None = None
    ) -> None:
        self.processors = tuple(processors)
        self.generator = generator

    @property
    def temperature(self) -> float:
        """The temperature of its warpers."""
        warpers = (one for one in self.processors if isinstance(one, TemperatureLogitsWarper))
        return math.prod(float(one.temperature) for one in warpers)

    def uniform(self, count: int, device: torch.device) -> torch.Tensor:
        """Return so many random numbers of its generator, from 0 up to 1, float32 [count]."""
        return torch.rand(count, generator=self.generator, device=device)

    def choose(self, logits: torch.Tensor, prefix: Sequence[int], tie_margin: float = 0.0) -> int:
        """Return one draw; ties do not matter for draws."""
        return self.draw(self.probabilities(logits, prefix))

    def draw(self, probabilities: torch.Tensor) -> int:
        """Return one draw from a distribution [V]."""
        return int(torch.multinomial(probabilities, 1, generator=self.generator))

    def probabilities(self, logits: torch.Tensor, prefix: Sequence[int]) -> torch.Tensor:
        """Return the processed distribution [V] of the token after a prefix, for logits [V]."""
        probabilities = _processed(self.processors, logits, prefix).softmax(dim=-1)[0]
        if probabilities.isnan().any():
            raise ValueError(
                "logits_processors: left no token to draw, or one of score inf; allowed: numbers and -inf"
            )
        return probabilities


# How the token after a node is chosen.
TokenRule = GreedyRule | SamplingRule


# The block that user code runs in: a step lets go there of what others wait for (`model.api.permits`).
USER_CODE: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar(
    "user_code", default=nullcontext
)


@contextmanager
def as_in_transformers() -> Iterator[None]:
    """Run user code without gradients but outside inference mode, whose tensors could not be written later."""
    with USER_CODE.get()(), torch.inference_mode(False), torch.no_grad():
        yield


def _processed(
    processors: Sequence[Processor], logits: torch.Tensor, prefix: Sequence[int]
) -> torch.Tensor:
    """Return the scores [1, V] after all processors; float32 as in transformers' own generation."""
    with as_in_transformers():
        scores = logits[None].to(dtype=torch.float32, copy=True)
        read = prefix if any(type(one) not in WITHOUT_PREFIX for one in processors) else prefix[-1:]
        input_ids = uploaded(read, logits.device)[None]  # [1, P]
        for processor in processors:
            found = processor(input_ids, scores)
            if not isinstance(found, torch.Tensor) or found.shape != scores.shape:
                shape = f"shape {list(found.shape)}" if isinstance(found, torch.Tensor) else found
                raise ValueError(
                    f"logits_processors: got {shape!s:.60} from {processor!r:.60}; allowed: scores "
                    f"{list(scores.shape)}"
                )
            scores = found
        if processors and scores.isnan().any():  # the model's own logits were looked at before
            raise ValueError("logits_processors: got NaN from them; allowed: numbers and -inf")
    return scores


class CountPenalty:
    """OpenAI's penalties, which transformers has not: a token that came c times after the prompt loses
    `frequency` x c, and `presence` if c is not 0.
    """

    def __init__(self, num_prompt: int, presence: float, frequency: float) -> None:
        self._num_prompt, self._presence, self._frequency = num_prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores [1, V] after these tokens [1, P]."""
        new = input_ids[:, self._num_prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new).to(scores))
        return scores - self._frequency * counts - self._presence * (counts > 0)


def sampling_processors(
    temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> list[LogitsProcessor]:
    """Return transformers' warpers for these settings, in the order of its own sampling.

    Args:
        temperature: above 0.
        top_k: 0 keeps all tokens.
        top_p: 1 keeps all tokens.
        min_p: least probability, as a share of the likeliest token's; 0 keeps all tokens.
    """
    processors: list[LogitsProcessor] = []
    if temperature != 1:
        processors.append(TemperatureLogitsWarper(temperature))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    if min_p:
        processors.append(MinPLogitsWarper(min_p))
    return processors


def refuse_stateful(processors: Iterable[object], allowed: str) -> None:
    """Raise ValueError for processors that may not be called twice, or about several texts."""
    for one in processors:
        if isinstance(one, STATEFUL):
            raise ValueError(
                f"logits_processors: got a {type(one).__name__}, which keeps the state of one text; "
                f"allowed: {allowed}"
            )
