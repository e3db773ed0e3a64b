"""Is a first difference a near-tie that rounding decided, or a bug?

In half precision a pass over a tree rounds otherwise than a pass over one token, so that two tokens
with almost equal logits may change places. A bug in a mask, a position or a cache row changes tokens
too, and the largest logits alone do not tell the two apart. So both methods replay the texts to their
first difference and on along the first one, and every logit is compared with a reference: the same
rounded weights in a wider type, one plain pass without cache.

- error: largest difference of any logit of a position from the reference;
- noise: 99.9th percentile of the error of plain decoding, over all positions replayed;
- a difference is a TIE if the reference's own gap between the two tokens is within the two expected
  errors, and no error of either replay is above 3 times the noise; else a BUG.

In float32 and wider every difference is a bug: there the loop decides near-ties as plain decoding
does (`model.engine.loop`).

Another program's texts, such as a server's, cannot be replayed. There each of the two tokens must stand so near to
the reference's largest logit that two errors of plain decoding explain it (`judge_tokens`).

Use:
    judge = Judge(target)
    verdict = judge.judge(prompt_ids, (plain_ids, other_ids), (vanilla_drafter, drafter))
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from evaluation.answers.differences import first_difference
from model.backends.target import TargetModel
from model.engine.drafter import Drafter
from model.engine.loop import decode
from model.methods.vanilla.drafter import VanillaConfig, VanillaDrafter

NOISE_QUANTILE = 0.999
# Fewer do not determine it.
NOISE_POSITIONS = 1000
# Chosen before any test: clean runs stay below, injected bugs lie far above.
NOISE_FACTOR = 3.0
TIE, BUG = "tie", "BUG"


def judge_tokens(
    scores: Sequence[float] | torch.Tensor, tokens: tuple[float, float], bound: float
) -> tuple[str, tuple[float, float]]:
    """Judge two tokens of which each was chosen greedily: a tie if both stand within `bound` of the largest score.

    Args:
        scores: of all tokens at the position, [V].
        tokens: the scores of the two.
        bound: how far below the largest one rounding may push the largest token's score.

    Returns:
        `TIE` or `BUG`, and how far the two stand below the largest score.
    """
    largest = float(torch.as_tensor(scores, dtype=torch.float64).max())
    gaps = (largest - tokens[0], largest - tokens[1])
    return (TIE if max(gaps) <= bound else BUG), gaps


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of a first difference."""

    verdict: str  # "tie", "BUG" or "not judged"

    @property
    def is_tie(self) -> bool:
        """Whether rounding alone decided."""
        return self.verdict == TIE


@dataclass(frozen=True, slots=True)
class Judgement(Verdict):
    """The verdict by logits, with the evidence; they are the reference's."""

    position: int  # index of the first differing token in the answer
    tokens: tuple[int, int]
    logits: tuple[float, float]
    gap: float  # distance of the two tokens' logits; of other programs' texts, of the worse one to the largest
    bound: float  # how large a gap the errors at this position can explain
    noise: float  # plain decoding's, as measured so far
    worst_errors: tuple[float, float]  # largest error of each replay over the whole first text

    def __str__(self) -> str:
        first, second = self.logits
        return (
            f"{self.verdict}: tokens {self.tokens[0]} and {self.tokens[1]} have reference logits "
            f"{first:.5g} and {second:.5g}, gap {self.gap:.3g}, bridged up to {self.bound:.3g}; "
            f"largest errors {self.worst_errors[0]:.3g} and {self.worst_errors[1]:.3g}, noise "
            f"{self.noise:.3g}"
        )


class Judge:
    """Judges differences between texts of one model, decoded as `target` is now, and measures its noise.

    The texts were decoded with this repetition penalty.
    """

    def __init__(self, target: TargetModel, repetition_penalty: float = 1.0) -> None:
        self.target = target
        self._penalty = RepetitionPenaltyLogitsProcessor(repetition_penalty)
        # How much larger the penalty may make a score's error.
        self._stretch = max(repetition_penalty, 1 / repetition_penalty)
        self.is_exact = target.dtype.itemsize >= 4
        wide = torch.float64 if self.is_exact else torch.float32
        self._reference = copy.deepcopy(target.model).to(wide)
        self._plain = VanillaDrafter(VanillaConfig(), target.vocab_size, target.device)
        self._plain_errors: list[float] = []

    @property
    def noise(self) -> float:
        """Plain decoding's error, 99.9th percentile; 0 before any was measured."""
        if not self._plain_errors:
            return 0.0
        return float(np.quantile(self._plain_errors, NOISE_QUANTILE))

    def measure_noise_on(self, texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Measure the noise on prompts and texts of plain decoding, until there are positions enough."""
        for prompt_ids, token_ids in texts:
            reference = self._reference_logits(prompt_ids, token_ids)
            self._plain_errors += self._errors(self._plain, prompt_ids, token_ids, reference)
            if len(self._plain_errors) >= NOISE_POSITIONS:
                break

    def judge(
        self,
        prompt_ids: Sequence[int],
        texts: tuple[Sequence[int], Sequence[int]],
        drafters: tuple[Drafter, Drafter],
    ) -> Judgement:
        """Judge the first difference of two texts.

        Args:
            prompt_ids: the prompt of both.
            texts: new tokens of each; they differ at a position that both have.
            drafters: the methods that decoded them. They are replayed from a fresh memory, so that
                their trees are not those of the run, but go through the same engine.

        Raises:
            ValueError: if one text is the beginning of the other.
        """
        position = _parting(*texts)
        # Over the whole text: a bug with a small effect at the first difference shows elsewhere.
        reference = self._reference_logits(prompt_ids, texts[0])
        errors = [self._errors(drafter, prompt_ids, texts[0], reference) for drafter in drafters]
        scores = self._scores(prompt_ids, texts[0][:position], reference)
        first, second = (float(scores[text[position]]) for text in texts)
        gap, noise = abs(first - second), self.noise
        # A replay may have smaller errors than the run, whose two were up to the noise.
        bound = self._stretch * max(errors[0][position] + errors[1][position], 2 * noise)
        worst = (max(errors[0]), max(errors[1]))
        is_tie = not self.is_exact and gap <= bound and max(worst) <= NOISE_FACTOR * noise
        return Judgement(
            TIE if is_tie else BUG,
            position,
            (texts[0][position], texts[1][position]),
            (first, second),
            gap,
            bound,
            noise,
            worst,
        )

    def judge_served(
        self,
        prompt_ids: Sequence[int],
        texts: tuple[Sequence[int], Sequence[int]],
        others: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> Judgement:
        """Judge the first difference of two texts of other programs, in any dtype.

        Args:
            prompt_ids: the prompt of both.
            texts: new tokens of each; they differ at a position that both have.
            others: further tokens that may stand for the first differing one of each, where the texts' own
                tokens are not known; the likeliest counts.

        Raises:
            ValueError: if one text is the beginning of the other.
        """
        position = _parting(*texts)
        known = texts[0][: position + 1]
        reference = self._reference_logits(prompt_ids, known)
        errors = self._errors(self._plain, prompt_ids, known, reference)
        scores = self._scores(prompt_ids, known[:position], reference)
        chosen = [
            max((text[position], *more), key=lambda token: float(scores[token]))
            for text, more in zip(texts, others, strict=True)
        ]
        tokens = (chosen[0], chosen[1])
        logits = (float(scores[tokens[0]]), float(scores[tokens[1]]))
        noise = self.noise
        bound = 2 * self._stretch * max(errors[position], noise)
        verdict, gaps = judge_tokens(scores, logits, bound)
        worst = (max(errors), max(errors))
        return Judgement(verdict, position, tokens, logits, max(gaps), bound, noise, worst)

    def _scores(
        self, prompt_ids: Sequence[int], known: Sequence[int], reference: torch.Tensor
    ) -> torch.Tensor:
        """Return the reference's scores [V] after the known tokens, with the repetition penalty."""
        prefix = torch.tensor([[*prompt_ids, *known]], device=reference.device)
        return self._penalty(prefix, reference[len(known)][None])[0]

    @torch.inference_mode()
    def _reference_logits(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> torch.Tensor:
        """Return logits [P, V] before each of the P tokens, from one pass without cache."""
        ids = torch.tensor([[*prompt_ids, *token_ids[:-1]]], device=self.target.device)
        logits = self._reference(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 :]
        return logits.to(self.target.device)

    def _errors(
        self,
        drafter: Drafter,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        reference: torch.Tensor,
    ) -> list[float]:
        """Return the error at each position of a text that a method is forced to decode."""
        drafter.reset()
        rule = _ForcedTokens(len(prompt_ids), token_ids, reference)
        steps = decode(self.target, drafter, prompt_ids, max_new_tokens=len(token_ids), rule=rule)
        for _ in steps:
            pass
        return rule.errors


def _parting(one: Sequence[int], other: Sequence[int]) -> int:
    position = first_difference(one, other)
    if position == min(len(one), len(other)):
        raise ValueError("texts: one is the beginning of the other; allowed: texts that differ")
    return position


class _ForcedTokens:
    """A rule that chooses the tokens of a given text, and notes how far logits are from the reference."""

    def __init__(
        self, prompt_length: int, token_ids: Sequence[int], reference: torch.Tensor
    ) -> None:
        self._prompt_length = prompt_length
        self._token_ids = token_ids
        self._reference = reference
        self.errors: list[float] = []

    def choose(
        self, logits: torch.Tensor, prefix: Sequence[int], tie_margin: float = 0.0
    ) -> int | None:
        place = len(prefix) - self._prompt_length
        reference = self._reference[place]
        self.errors.append(float((logits.to(reference.dtype) - reference).abs().max()))
        return self._token_ids[place]
