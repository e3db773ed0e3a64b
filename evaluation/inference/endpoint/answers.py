"""Questions answered by a server, one by one or several at a time, as rows of an answer file.

Times are those that a client sees. `share_time` divides each moment by the requests under way, so that
shares add up to the run's time (docs/numbers.md). Steps are new tokens less accepted drafts, where the
server says how many these are: every pass gives one token beside them, whether it had a draft or not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from evaluation.answers.row import AnswerRow, Choice
from evaluation.inference.config import DecodingOptions
from evaluation.inference.endpoint.client import Client, EndpointError, Reply
from evaluation.inference.endpoint.counters import difference
from evaluation.questions.questions import Question


class ShareClock:
    """Seconds of which each request under way has an equal share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_under_way = 0
        self._seconds = 0.0  # of one share since the clock was made
        self._last = time.perf_counter()

    def begin(self) -> float:
        """Begin a request; return the clock's seconds."""
        return self._turn(1)

    def end(self) -> float:
        """End a request; return the clock's seconds, whose difference to its begin is its share."""
        return self._turn(-1)

    def _turn(self, change: int) -> float:
        with self._lock:
            now = time.perf_counter()
            if self._num_under_way:
                self._seconds += (now - self._last) / self._num_under_way
            self._last = now
            self._num_under_way += change
            return self._seconds


class EndpointAnswerer:
    """A server that answers questions with a run's options, `concurrency` at a time."""

    def __init__(
        self,
        client: Client,
        sampling: DecodingOptions,
        model_id: str,
        num_choices: int = 1,
        concurrency: int = 1,
    ) -> None:
        self.client = client
        self._sampling, self._model_id = sampling, model_id
        self._num_choices, self._concurrency = num_choices, concurrency
        self._clock = ShareClock()

    def memory(self) -> dict[str, Any]:
        """Return what it keeps across questions: nothing that we could save."""
        return {}

    def warm_up(self, question: Question, num_warmup: int) -> None:
        """Answer a question unmeasured, as many at a time as later."""
        for _ in self.rows([question] * num_warmup):
            pass

    def rows(self, questions: Sequence[Question], in_parts: bool = False) -> Iterator[AnswerRow]:
        """Yield the row of each question as it is answered; one that fails has its cause.

        `in_parts`: after `concurrency` questions the server rests until the next row is asked for.
        """
        size = self._concurrency if in_parts else max(1, len(questions))
        with ThreadPoolExecutor(self._concurrency) as pool:
            try:
                for begin in range(0, len(questions), size):
                    part = questions[begin : begin + size]
                    for future in as_completed([pool.submit(self._row, one) for one in part]):
                        yield future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _row(self, question: Question) -> AnswerRow:
        choices: list[Choice] = []
        error: str | None = None
        for index in range(self._num_choices):
            turns: list[dict[str, Any]] = []
            try:
                for turn in self._turns(question, self._sampling.seed + index):
                    turns.append(turn)
            except Exception as failure:
                is_known = isinstance(failure, EndpointError)
                error = str(failure) if is_known else f"{type(failure).__name__}: {failure}"
            if turns:
                keys = [key for key in turns[0] if all(key in turn for turn in turns)]
                lists = {key: [turn[key] for turn in turns] for key in keys}
                choices.append(Choice({"index": index, **lists}))
            if error:
                break
        return AnswerRow.of_question(question, self._model_id, choices, error)

    def _turns(self, question: Question, seed: int) -> Iterator[dict[str, Any]]:
        """Yield the figures of each turn's answer, by the names of a choice's lists."""
        answers: list[str] = []
        for turn in range(len(question.turns)):
            said = asked_messages(question, turn, answers)
            reply, share, counted = self._asked(said, seed, question.tools)
            # As Spec-Bench's commands keep and repeat an answer; the spaces around it differ between servers.
            reply.text = reply.text.strip()
            answers.append(reply.text)
            yield _figures(reply, share if self._concurrency > 1 else None, counted)

    def _asked(
        self, messages: Sequence[dict[str, Any]], seed: int, tools: Sequence[Any] = ()
    ) -> tuple[Reply, float, dict[str, int]]:
        """Return a reply, its share of the time, and what /metrics counted meanwhile.

        Counters are those of all requests: they are read where this is the only one.
        """
        is_alone = self._concurrency == 1
        before = self.client.counters() if is_alone else {}
        begin = self._clock.begin()
        try:
            reply = self.client.reply(messages, self._sampling, seed, tools)
        finally:
            end = self._clock.end()
        after = self.client.counters() if is_alone and not reply.speculative else {}
        return reply, end - begin, difference(before, after)


def asked_messages(question: Question, turn: int, answers: Sequence[str]) -> list[dict[str, Any]]:
    """Return the messages of a turn: after what was answered before, or in a trajectory as they were."""
    if question.messages:
        return question.before(turn)
    said = [] if question.system is None else [{"role": "system", "content": question.system}]
    for user, assistant in zip(question.turns[:turn], answers, strict=False):
        said += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return [*said, {"role": "user", "content": question.turns[turn]}]


def _figures(reply: Reply, share: float | None, counted: dict[str, int]) -> dict[str, Any]:
    spec = reply.speculative or counted
    found: dict[str, Any] = {
        "turns": reply.text,
        "new_tokens": reply.new_tokens,
        "wall_time": reply.wall_time,
        "prompt_tokens": reply.prompt_tokens,
        "cached_tokens": reply.cached_tokens,
        "time_to_first_token": reply.chunk_times[0] if reply.chunk_times else reply.wall_time,
        "chunk_times": [round(seconds, 6) for seconds in reply.chunk_times],
        "stop_reasons": reply.finish_reason,
        "tool_calls": reply.tool_calls,
        "reasoning": reply.reasoning,
    }
    if share is not None:
        found["share_time"] = share
    if reply.token_ids is not None:
        found["token_ids"] = reply.token_ids
    if spec:
        found["decoding_steps"] = reply.new_tokens - spec["num_accepted_draft_tokens"]
        found["draft_tokens"] = spec["num_draft_tokens"]
        found["speculative_decoding"] = spec
    return found
