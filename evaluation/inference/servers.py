"""A server answers questions, one by one or several at a time.

Times are those that a client sees. `share_time` divides each moment by the requests under way, so that
shares add up to the run's time (docs/numbers.md). Steps are new tokens less accepted drafts, where the
server says how many these are: every pass gives one token beside them, whether it had a draft or not.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from evaluation.inference.answering import Answerer, Failure, Prompt, Result
from evaluation.inference.client import Client, EndpointError, ServerReply
from evaluation.inference.plan import OtherProgram, Plan
from evaluation.questions.known import request_of
from evaluation.questions.questions import Question
from model.backends.target import TargetModel


@dataclass(frozen=True, slots=True)
class Server(OtherProgram):
    """A server as a method of a comparison: it decodes as it likes, and is named by its address."""

    is_served: ClassVar[bool] = True

    def answerer(self, plan: Plan, target: TargetModel | None) -> Answerer:
        return ServerAnswerer(plan)


class ShareClock:
    """Seconds of which each request under way has an equal share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_under_way = 0
        self._seconds = 0.0  # of one share since the clock was made
        self._last = time.perf_counter()

    def begin(self) -> float:
        """Begin a request; return the clock's seconds."""
        return self._count(1)

    def end(self) -> float:
        """End a request; return the clock's seconds, whose difference to its begin is its share."""
        return self._count(-1)

    def _count(self, change: int) -> float:
        with self._lock:
            now = time.perf_counter()
            if self._num_under_way:
                self._seconds += (now - self._last) / self._num_under_way
            self._last = now
            self._num_under_way += change
            return self._seconds


class ServerAnswerer(Answerer):
    """A server with a run's options, asked as many turns at a time as the run's batch holds."""

    def __init__(self, plan: Plan) -> None:
        assert plan.client is not None, "it was reached when the run was checked"
        self._client: Client = plan.client
        self._sampling = plan.run.sampling
        self.size = plan.run.answers.batch_size
        self._pool = ThreadPoolExecutor(self.size)
        self._futures: dict[int, Future[Result]] = {}
        self._clock = ShareClock()

    def ask(self, slot: int, prompt: Prompt) -> None:
        self._futures[slot] = self._pool.submit(self._result, prompt)

    def ended(self, under_way: Mapping[int, Prompt]) -> Sequence[tuple[int, Result]]:
        done, _ = wait(self._futures.values(), return_when=FIRST_COMPLETED)
        slots = [slot for slot, future in self._futures.items() if future in done]
        return [(slot, self._futures.pop(slot).result()) for slot in slots]

    def end_warmup(self) -> None:
        url = self._client.url
        if not self._client.gives_token_ids:
            print(f"{url} gives no token ids: texts are compared", file=sys.stderr)
        if not self._client.reset():
            print(f"{url} remembers the warm-up: it has no /reset_prefix_cache", file=sys.stderr)

    def _result(self, prompt: Prompt) -> Result:
        """Return a turn's figures by the names of a choice's lists.

        Counters of /metrics are those of all requests: they are read where this is the only one.
        """
        client, is_alone = self._client, self.size == 1
        messages = asked_messages(prompt.question, prompt.turn, prompt.answers)
        try:
            before = client.counters() if is_alone else {}
            begin = self._clock.begin()
            try:
                seed = self._sampling.seed + prompt.choice
                fields = request_of(prompt.question, prompt.turn)
                tools = prompt.question.tools
                reply = client.reply(messages, self._sampling, seed, tools, fields)
            finally:
                end = self._clock.end()
            after = client.counters() if is_alone and not reply.speculative_decoding else {}
        except EndpointError as error:
            return Failure(str(error))
        except Exception as error:
            return Failure.of(error)
        # Every name that was counted, since the request began.
        counted = {name: after[name] - before[name] for name in after} if before else {}
        return _figures(reply, None if is_alone else end - begin, counted)


def asked_messages(question: Question, turn: int, answers: Sequence[str]) -> list[dict[str, Any]]:
    """Return the messages of a turn: after what was answered before, or in a trajectory as they were."""
    if question.messages:
        return question.before(turn)
    said = [] if question.system is None else [{"role": "system", "content": question.system}]
    for user, assistant in zip(question.turns[:turn], answers, strict=False):
        said += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return [*said, {"role": "user", "content": question.turns[turn]}]


def _figures(reply: ServerReply, share: float | None, counted: dict[str, int]) -> dict[str, Any]:
    found = asdict(reply)
    ids, spec = found.pop("token_ids"), found.pop("speculative_decoding") or counted
    lengths = found.pop("accept_lengths")
    found |= {} if share is None else {"share_time": share}
    found |= {} if ids is None else {"token_ids": ids}
    if spec:
        # Some servers count drafts that were accepted past the end of the text.
        without = reply.new_tokens - spec["num_accepted_draft_tokens"]
        found["decoding_steps"] = max(without, spec.get("num_spec_steps", 0), 1)
        found["draft_tokens"] = spec["num_draft_tokens"]
        found["speculative_decoding"] = spec
    if lengths:
        found |= {"accept_lengths": lengths, "decoding_steps": len(lengths)}
    return found
