"""The decoding thread: one batch, which requests join and leave between two steps.

A request's text comes out piece by piece, cut at a stop string. Counters at /metrics stand under vLLM's names,
which benches read before and after a run. By vLLM's definition a step without a draft is no draft.
`token_recycling:steps` counts each one: `vllm:generation_tokens / token_recycling:steps` is tokens a step.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Full

import torch
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)

from ..api.decoder import SpeculativeDecoder
from ..api.output import StreamPiece, TokenLogprob
from ..api.texts import Text, TextStream
from ..backends.target import TargetModel
from ..engine.step import StepRecord
from .acceptance import StepCounts

logger = logging.getLogger(__name__)

LABELS = ("model_name", "engine")


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way through the decoding thread; times are `time.monotonic`."""

    text: Text  # its stop strings, before which it ends, are none of its request's
    send: Callable[[StreamPiece | Exception], None]  # called in the decoding thread
    deadline: float = float("inf")
    echo: str = ""  # what the answer tells of its prompt
    # Likeliest tokens told beside each of the prompt's; None: nothing is told.
    num_top_of_prompt: int | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # in the end
    is_cancelled: bool = False  # set from any thread; the text leaves before the next step
    steps: list[StepCounts] = field(default_factory=list)  # so far
    # Of its arrival, its admission, its first and last piece.
    asked: float = field(default_factory=time.monotonic)
    begun: float = 0.0
    first: float = 0.0
    last: float = 0.0
    num_cached: int = 0  # tokens of the prompt whose rows were those of an earlier text
    _stream: TextStream = field(init=False)

    def __post_init__(self) -> None:
        self._stream = TextStream(self.text.tokenizer, self.text.stop)

    def is_over(self, now: float) -> bool:
        """Whether nobody waits for it any more."""
        return self.is_cancelled or now > self.deadline

    @property
    def num_new(self) -> int:
        """New tokens so far."""
        return sum(step.tokens for step in self.steps)

    def piece(self, record: StepRecord) -> StreamPiece:
        """Take a step; return what it adds to the answer, up to the token that completes a stop string."""
        shown, count, most = "", 0, len(record.tokens)
        size = 1 if self.text.stop else most
        while count < most and self._stream.stop_string is None:
            tokens = record.tokens[count : count + size]
            count += size
            shown += self._stream.add(tokens, record.stop_reason is not None and count == most)
        tokens = record.tokens[:count]
        self.steps.append(StepCounts.of(record, count))
        self.last = time.monotonic()
        self.first = self.first or self.last
        self.num_cached += record.num_cached
        logprobs = self.text.logprobs.take(tokens) if self.text.logprobs else None
        return StreamPiece(shown, tokens, record, self._stream.stop_string, logprobs)

    def times(self) -> dict[str, float | None]:
        """Return the times of the answer in the fields of vLLM's responses."""
        decoding = self.last - self.first
        rest = self.num_new - 1  # tokens after the first one
        return {
            "queue_time_ms": 1e3 * (self.begun - self.asked),
            "time_to_first_token_ms": 1e3 * (self.first - self.asked),
            "generation_time_ms": 1e3 * decoding,
            "mean_itl_ms": 1e3 * decoding / rest if rest else None,
            "tokens_per_second": rest / decoding if rest and decoding else None,
        }


class Counters:
    """Counts what is decoded by a model of this name, and asks how many requests are decoded and wait."""

    def __init__(
        self, name: str, num_running: Callable[[], int], num_waiting: Callable[[], int]
    ) -> None:
        disable_created_metrics()  # readers take them for further positions
        self._registry = CollectorRegistry()
        self._values = (name, "0")
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Steps with a draft.")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Drafted nodes.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Accepted ones.")
        by_depth = "Accepted tokens by their depth in the draft, from 0."
        self._by_position = self._new(
            "vllm:spec_decode_num_accepted_tokens_per_pos", by_depth, "position"
        )
        self._steps = self._counter("token_recycling:steps", "Steps, with and without a draft.")
        self.prompt = self._counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._generated = self._counter("vllm:generation_tokens", "New tokens.")
        self._ended = self._new(
            "vllm:request_success", "Answers, by why they ended.", "finished_reason"
        )
        for metric, count in (("running", num_running), ("waiting", num_waiting)):
            gauge = Gauge(
                f"vllm:num_requests_{metric}", "Requests.", LABELS, registry=self._registry
            )
            gauge.labels(*self._values).set_function(count)

    def step(self, step: StepCounts) -> None:
        """Count a step of a text."""
        self._steps.inc()
        self._generated.inc(step.tokens)
        if step.drafted:
            self._drafts.inc()
            self._drafted.inc(step.drafted)
            self._accepted.inc(step.accepted)
        for position in range(step.accepted):
            self._by_position.labels(*self._values, str(position)).inc()

    def end(self, reason: str) -> None:
        """Count an answer that ended."""
        self._ended.labels(*self._values, reason).inc()

    def page(self) -> bytes:
        """Return what Prometheus reads."""
        page: bytes = generate_latest(self._registry)
        return page

    def _new(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, (*LABELS, *labels), registry=self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return self._new(name, text).labels(*self._values)


class DecodingThread(threading.Thread):
    """Decodes requests in the order in which they came, several in each pass; nobody else uses the decoder."""

    def __init__(
        self, decoder: SpeculativeDecoder, name: str, batch_size: int, max_queue: int
    ) -> None:
        super().__init__(name="decoding", daemon=True)
        self._decoder, self._size, self._max_queue = decoder, batch_size, max_queue
        self._waiting: deque[Job] = deque()
        self._running: set[Job] = set()
        # Held while requests come, wait or leave, which other threads ask and cause; never while a step is decoded.
        self._changed = threading.Condition()
        self._is_closing = False
        self._resets: deque[threading.Event] = deque()  # asked for
        self.counters = Counters(name, lambda: len(self._running), lambda: len(self._waiting))
        self._batch = decoder.queue.batch(batch_size)  # measures what nodes cost, once

    def submit(self, jobs: Sequence[Job]) -> None:
        """Let a request's texts wait for places; callable from any thread.

        Raises:
            queue.Full: if too many wait.
            RuntimeError: if nothing is decoded any more.
        """
        with self._changed:
            if self._is_closing:
                raise RuntimeError("the decoding thread has ended")
            room = self._max_queue + self._size - len(self._running) - len(self._waiting)
            if room < len(jobs):
                raise Full
            self._waiting += jobs
            self._changed.notify()

    def reset(self) -> None:
        """Let the method forget what it has learned before the next step; callable from any thread."""
        done = threading.Event()
        with self._changed:
            if self._is_closing:
                return
            self._resets.append(done)
            self._changed.notify()
        done.wait()

    def close(self) -> None:
        """End after the step under way; requests that are left get an error."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def run(self) -> None:
        """Decode until closed."""
        try:
            while self._has_work():
                while self._resets:
                    self._decoder.drafter.reset()
                    self._decoder.queue.prefix_cache.clear()
                    self._resets.popleft().set()
                self._give_up()
                self._admit()
                if self._running:
                    self._step()
        finally:
            with self._changed:
                self._is_closing = True
                left = [*self._running, *self._waiting]
                self._running.clear()
                self._waiting.clear()
                while self._resets:
                    self._resets.popleft().set()
            for job in left:
                job.send(RuntimeError("the server ends"))

    def _has_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: self._waiting or self._running or self._resets or self._is_closing
            )
            return not self._is_closing

    def _give_up(self) -> None:
        """Let requests leave that were cancelled, or that take too long."""
        now = time.monotonic()
        with self._changed:
            gone = [job for job in self._waiting if job.is_over(now)]
            for job in gone:
                self._waiting.remove(job)
        for job in [job for job in self._running if job.is_over(now)]:
            self._running.discard(job)
            self._batch.remove(job)
            gone.append(job)
        for job in gone:
            self.counters.end("abort")
            job.send(TimeoutError())

    def _admit(self) -> None:
        """Let requests that wait join the batch, as many as have room."""
        while self._batch.has_capacity:
            with self._changed:
                if not self._waiting:
                    return
                job = self._waiting.popleft()
                self._running.add(job)
            job.begun = time.monotonic()
            try:
                if job.num_top_of_prompt is not None:
                    job.prompt_logprobs = prompt_logprobs(
                        self._decoder.target, job.text.request.prompt_ids, job.num_top_of_prompt
                    )
                self._batch.add(job, job.text.request)
            except Exception as error:  # such as no memory for its rows
                self._failed(job, error)
            else:
                self.counters.prompt.inc(len(job.text.request.prompt_ids))

    def _step(self) -> None:
        try:
            events = self._batch.step()
        except Exception as error:  # of the pass: its texts are lost, others are served
            self._batch.close()
            for job in list(self._running):
                self._failed(job, error)
            self._batch = self._decoder.queue.batch(self._size)
            return
        for event in events:
            if event.error is not None:
                self._failed(event.key, event.error)
            if event.record is not None:
                self._take(event.key, event.record)

    def _take(self, job: Job, record: StepRecord) -> None:
        """Hand on what a step brought; a text that ends leaves."""
        try:
            piece = job.piece(record)
        except Exception as error:  # of the tokenizer
            if record.stop_reason is None:
                self._batch.remove(job)
            self._failed(job, error)
            return
        self.counters.step(job.steps[-1])
        if piece.finish_reason is not None:
            self.counters.end(piece.finish_reason)
            self._running.discard(job)
            if record.stop_reason is None:  # a stop string, of which the batch knows nothing
                self._batch.remove(job)
        job.send(piece)

    def _failed(self, job: Job, error: Exception) -> None:
        logger.error("a request failed", exc_info=error)
        self.counters.end("error")
        self._running.discard(job)
        job.send(error)


@torch.inference_mode()
def prompt_logprobs(
    target: TargetModel, prompt_ids: Sequence[int], num_top: int
) -> list[TokenLogprob]:
    """Return the model's log-probability of each token of a prompt, of the first NaN.

    Raises:
        ValueError: for a prompt of which the model gives no logits.
    """
    found = [TokenLogprob(prompt_ids[0], math.nan, [])]
    for chunk in target.prefill(prompt_ids, target.new_cache(len(prompt_ids)), with_logits=True):
        if chunk.logits is None:
            raise ValueError("echo: this model gives no log-probabilities of so long a prompt")
        for logits in chunk.logits:
            row = logits.float().log_softmax(dim=-1)
            found.append(TokenLogprob.of(prompt_ids[len(found)], row, num_top))
    return found
