"""Judge where two answers begin to differ, by a server's own log-probabilities: it is asked again, token by token.

The server answers the same messages once more with the likeliest tokens at each place (`top_logprobs`). Where the
two texts differ first, both their tokens must be among these, within `TIE_NATS` of the likeliest; else it is a bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evaluation.answers.differences import Difference, first_difference
from evaluation.checking.rerun import FileJudge, Paths, Rows, TurnKey, check_shared, questions_of
from evaluation.checking.tie_or_bug import BUG, Verdict, judge_tokens
from evaluation.inference.client import Client, EndpointConfig, EndpointError
from evaluation.inference.servers import asked_messages
from model.commands.command_line import UserError

# Two logits of 16 to 32 that bfloat16 rounds up and down: neighbours there are 0.125 apart.
TIE_NATS = 0.25
# The most that vLLM and OpenAI give.
NUM_LIKELIEST = 20
NOT_JUDGED = "not judged"
LONGEST_SHOWN = 30


@dataclass(frozen=True, slots=True)
class LogprobJudgement(Verdict):
    """The verdict by a server's log-probabilities."""

    cause: str
    tokens: tuple[str, str] = ("", "")
    gaps: tuple[float, float] = (0.0, 0.0)  # below the likeliest token's log-probability

    def __str__(self) -> str:
        return f"{self.verdict}: {self.cause}"


class LogprobReplay(FileJudge):
    """Two answer files with a server that judges them; a `UserError` if it cannot be reached."""

    def __init__(
        self, paths: Paths, rows: Rows, config: EndpointConfig, question_file: str | None
    ) -> None:
        self._record = check_shared(paths)
        super().__init__(rows, questions_of(self._record, question_file))
        self._client = Client(config)

    def can_judge(self, difference: Difference) -> bool:
        """Whether the texts differ: tool calls and reasoning have no place in the log-probabilities."""
        return difference.turn is not None and difference.cause in ("tokens differ", "texts differ")

    def verdicts(self, places: Sequence[TurnKey]) -> list[LogprobJudgement]:
        """Judge the answers that differ at these places; a `UserError` if the server does not answer."""
        try:
            return [self._verdict(place) for place in places]
        except EndpointError as error:
            raise UserError(str(error)) from error

    def _verdict(self, place: TurnKey) -> LogprobJudgement:
        turn = place[2]
        first, second = (self._choice(side, place).turns for side in (0, 1))
        said = asked_messages(self._questions[place[0]], turn, first)
        return judge_logprobs(self._asked(said), (first[turn], second[turn]))

    def _asked(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        body = {
            "model": self._client.model,
            "messages": messages,
            "max_tokens": self._record["max_new_tokens"],
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": NUM_LIKELIEST,
        }
        answer = self._client.post("/v1/chat/completions", body)
        try:
            content: list[dict[str, Any]] = answer["choices"][0]["logprobs"]["content"]
        except (KeyError, IndexError, TypeError):
            raise EndpointError(
                f"endpoint {self._client.url}: sends no logprobs; give --model-path instead"
            ) from None
        return content


def judge_logprobs(content: Sequence[dict[str, Any]], texts: tuple[str, str]) -> LogprobJudgement:
    """Judge where two texts begin to differ.

    Args:
        content: OpenAI's `logprobs.content` of one of the texts, or of a third that agrees with both up to there.
        texts: the two; they differ.
    """
    parted = first_difference(*texts)
    if parted == min(map(len, texts)):
        return LogprobJudgement(NOT_JUDGED, "one text ends where they begin to differ")
    begin = 0
    for entry in content:
        token = str(entry["token"])
        if begin + len(token) > parted:
            break
        if not texts[0].startswith(token, begin):
            return LogprobJudgement(NOT_JUDGED, f"the server parts from both at character {begin}")
        begin += len(token)
    else:
        return LogprobJudgement(NOT_JUDGED, "the server's answer ends before the two part")
    top = {str(one["token"]): float(one["logprob"]) for one in entry["top_logprobs"]}
    top.setdefault(token, float(entry["logprob"]))
    found = [_token(top, text[begin:], parted - begin) for text in texts]
    missing = [text for text, name in zip(texts, found, strict=True) if name is None]
    if missing:
        rest = missing[0][begin : begin + LONGEST_SHOWN]
        cause = f"no token of {rest!r} is among the {len(top)} likeliest at character {begin}"
        return LogprobJudgement(BUG, cause)
    one, other = found[0] or "", found[1] or ""
    verdict, gaps = judge_tokens(list(top.values()), (top[one], top[other]), TIE_NATS)
    cause = (
        f"{one!r} and {other!r} stand {gaps[0]:.3g} and {gaps[1]:.3g} nats below the likeliest "
        f"token, bridged up to {TIE_NATS}"
    )
    return LogprobJudgement(verdict, cause, (one, other), gaps)


def _token(top: dict[str, float], rest: str, num_common: int) -> str | None:
    """Return the likeliest token that begins a text and reaches beyond what the two have in common."""
    fitting = [name for name in top if len(name) > num_common and rest.startswith(name)]
    return max(fitting, key=lambda name: top[name], default=None)
