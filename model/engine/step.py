"""The record of a step, and of a whole answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from .tree import DraftTree

PARTS = ("draft", "forward", "verify", "keep", "observe")


@dataclass(slots=True, repr=False)
class StepRecord:
    """One step of decoding.

    Attributes:
        tokens: emitted token ids, never past the end of text or the limit.
        tree: the verified draft.
        path: accepted nodes from the root downward.
        stop_reason: None while the sequence goes on, else "eos", "criteria", "length", "context" (full), or what
            interrupted it: "time" or "cancelled".
        prefill_ns: time of reading the prompt, on the first step; 0 on others.
        draft_ns, forward_ns, verify_ns, keep_ns, observe_ns: time of each part. The host waits for the
            device in verify alone. A whole step on the device is counted as forward.
        num_sequences: sequences that shared the pass; the times are those of all of them.
        num_cached: rows of the prompt that were those of an earlier text, on the first step; 0 on others.
    """

    tokens: list[int]
    tree: DraftTree
    path: list[int]
    stop_reason: str | None = None
    prefill_ns: int = 0
    draft_ns: int = 0
    forward_ns: int = 0
    verify_ns: int = 0
    keep_ns: int = 0
    observe_ns: int = 0
    num_sequences: int = 1
    num_cached: int = 0

    def __repr__(self) -> str:
        ended = f", stop_reason={self.stop_reason!r}" if self.stop_reason else ""
        milliseconds = self.step_ns / 1e6
        return f"StepRecord(tokens={self.tokens}, {self.num_nodes} nodes, {milliseconds:.1f} ms{ended})"

    @property
    def step_ns(self) -> int:
        """Time of the step, without the prompt."""
        return self.draft_ns + self.forward_ns + self.verify_ns + self.keep_ns + self.observe_ns

    @property
    def share_ns(self) -> float:
        """This sequence's share of the time, with its prompt: the shares of all sequences add up to the time of a
        run.
        """
        return self.prefill_ns + self.step_ns / self.num_sequences

    def set_times(self, timer: StepTimer, num_sequences: int = 1) -> None:
        """Set the times of the parts, of a step that this many sequences shared."""
        self.draft_ns, self.forward_ns, self.verify_ns, self.keep_ns, self.observe_ns = (
            timer.parts()
        )
        self.num_sequences = num_sequences

    @property
    def num_nodes(self) -> int:
        """Nodes verified, root included."""
        return self.tree.topology.num_nodes

    @property
    def accepted_nodes(self) -> list[int]:
        """Drafted nodes whose tokens were emitted: node `path[i + 1]` guessed `tokens[i]`."""
        return self.path[1 : 1 + len(self.tokens)]


class StepTimer:
    """A stopwatch for the parts of a step: nanoseconds of each, counted from construction."""

    def __init__(self) -> None:
        self._times = dict.fromkeys(PARTS, 0)
        self._last = time.perf_counter_ns()

    def end(self, part: str) -> int:
        """End a part; return its time, counted from the end of the last part. Equal parts add up."""
        now = time.perf_counter_ns()
        taken = now - self._last
        self._times[part] = self._times.get(part, 0) + taken
        self._last = now
        return taken

    def parts(self) -> list[int]:
        """Return the times in the order of `PARTS`; 0 for skipped parts."""
        return [self._times[part] for part in PARTS]


@dataclass(slots=True)
class Generation:
    """A whole answer.

    Attributes:
        token_ids: new tokens.
        steps: a record of every step, in order.
    """

    token_ids: list[int] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)

    @property
    def accept_lengths(self) -> list[int]:
        """Tokens emitted by each step, bonus token included; their sum is the number of new tokens."""
        return [len(step.tokens) for step in self.steps]
