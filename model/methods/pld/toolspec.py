"""ToolSpec: what a schema leaves no choice about is drafted, and then what followed in earlier calls.

A grammar of the request says which tokens must follow (`Request.guesses`). After them, and where it leaves a
choice, the longest n-gram at the text's end is looked up in the text and in earlier answers, and what stands after
its latest occurrence is drafted: one chain of both.

Source: H. Xia, Y. Li, C. Du, M. Song and W. Li, ToolSpec, 2026, arXiv 2604.13519: its abstract, which has no sizes.
Departures: the state machine is that of the grammar (`model.api.expected`), and earlier calls are found by their
tokens, not by their likeness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...budget.memory import check_ids, check_names, check_tensor
from ...engine.budget import MAX_DRAFT
from ...engine.drafter import Needs, VerifiedStep
from ...options import option, start_option
from .drafter import MAX_NGRAM_SIZE, PldConfig, PldDrafter

ANSWERS = "answers"


@dataclass(frozen=True, slots=True)
class ToolSpecConfig(PldConfig):
    num_pred_tokens: int = option(20, "length of the proposed chain", least=1, most=MAX_DRAFT)
    max_ngram_size: int = option(5, "longest n-gram looked up", least=1, most=MAX_NGRAM_SIZE)
    history: int = option(4096, "tokens of earlier answers that are kept", least=1)
    match: str = option("latest", "which occurrence to continue", choices=("first", "latest"))
    start: str = start_option("earlier answers live")


class ToolSpecDrafter(PldDrafter):
    config_class = ToolSpecConfig

    def __init__(self, config: ToolSpecConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        self.needs = Needs(reads_rejected=False, cold_start=config.start == "cold")
        self._answers: list[int] = []  # of earlier texts; siblings share it
        self._answer: list[int] = []  # of this text
        self._forced: Sequence[int] = ()

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._end()
        self._forced = ()
        super().start([*self._answers, *prompt_ids])

    def hint(self, tokens: Sequence[int]) -> None:
        self._forced = tokens

    def _look_up(self, max_depth: int) -> None:
        forced, text = list(self._forced[: min(max_depth, self.config.num_pred_tokens)]), self._text
        end = len(text)
        text += forced
        super()._look_up(max_depth - len(forced))
        del text[end:]
        if forced:  # as sure as the longest match
            self._ngram_size = self.config.max_ngram_size
        self._guess = [*forced, *self._guess][: self.config.num_pred_tokens]

    def observe(self, step: VerifiedStep) -> None:
        super().observe(step)
        self._answer += step.acceptance.tokens
        if step.stop_reason is not None:
            self._end()

    def skip(self, tokens: Sequence[int]) -> None:
        super().skip(tokens)
        self._answer += tokens

    def _end(self) -> None:
        """Keep the answer, which has ended."""
        self._answers += self._answer
        del self._answers[: -self.config.history]
        self._answer = []

    def reset(self) -> None:
        super().reset()
        self._answers.clear()
        self._answer = []

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the tokens of the latest answers, int32."""
        latest = [*self._answers, *self._answer][-self.config.history :]
        return {ANSWERS: torch.tensor(latest, dtype=torch.int32)}

    def load_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        check_names(tensors, self.memory())
        found = tensors[ANSWERS]
        check_tensor("matrix: got", found, torch.int32, (found.numel(),))
        check_ids(found, self.vocab_size)
        self._answers[:], self._answer = found.tolist(), []
