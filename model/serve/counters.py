"""Counters at /metrics, under vLLM's names, which benches read before and after a run.

By vLLM's definition a step without a draft is no draft. `token_recycling:steps` counts every step, so that
`vllm:generation_tokens / token_recycling:steps` is tokens a step.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)

from .acceptance import StepCounts

LABELS = ("model_name", "engine")


class Counters:
    """Counts what is decoded.

    Args:
        name: the model's.
        num_running: returns the number of requests that are decoded.
        num_waiting: returns the number of those that wait.
    """

    def __init__(
        self, name: str, num_running: Callable[[], int], num_waiting: Callable[[], int]
    ) -> None:
        disable_created_metrics()  # readers take them for further positions
        self._registry = CollectorRegistry()
        self._values = (name, "0")
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Steps with a draft.")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Drafted nodes.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Accepted ones.")
        self._by_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their depth in the draft, from 0.",
            (*LABELS, "position"),
            registry=self._registry,
        )
        self._steps = self._counter("token_recycling:steps", "Steps, with and without a draft.")
        self._prompt = self._counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._generated = self._counter("vllm:generation_tokens", "New tokens.")
        self._ended = Counter(
            "vllm:request_success",
            "Answers, by why they ended.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        for metric, count in (("running", num_running), ("waiting", num_waiting)):
            gauge = Gauge(
                f"vllm:num_requests_{metric}", "Requests.", LABELS, registry=self._registry
            )
            gauge.labels(*self._values).set_function(count)

    def begin(self, num_prompt: int) -> None:
        """Count a prompt of this many tokens."""
        self._prompt.inc(num_prompt)

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

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(name, text, LABELS, registry=self._registry)
        return counter.labels(*self._values)
