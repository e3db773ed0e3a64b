"""Steps: the record of one, and a step that runs whole on the device.

Shapes: N nodes, k candidates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from .budget import DraftBudget
from .tree import DraftTree, TreeTopology
from .verification import Acceptance

PARTS = ("draft", "forward", "verify", "keep", "observe")


@dataclass(slots=True)
class StepRecord:
    """One step of decoding.

    Attributes:
        tokens: emitted token ids, never past the end of text or the limit.
        tree: the verified draft.
        path: accepted nodes from the root downward.
        stop_reason: None while the text goes on, else "eos", "criteria", "length" or "context" (full).
        prefill_ns: time of reading the prompt, on the first step; 0 on others.
        draft_ns, forward_ns, verify_ns, keep_ns, observe_ns: time of each part. The host waits for the
            device in verify alone. A whole step on the device is counted as forward.
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

    @property
    def num_nodes(self) -> int:
        """Nodes verified, root included."""
        return self.tree.topology.num_nodes

    @property
    def accepted_nodes(self) -> list[int]:
        """Drafted nodes whose tokens were emitted: node `path[i + 1]` guessed `tokens[i]`."""
        return self.path[1 : 1 + len(self.tokens)]


class Laps:
    """Nanoseconds of each part of a step, counted from construction."""

    def __init__(self) -> None:
        self._times = dict.fromkeys(PARTS, 0)
        self._last = time.perf_counter_ns()

    def end(self, part: str) -> int:
        """End a part; return its time, counted from the end of the last part."""
        now = time.perf_counter_ns()
        self._times[part] = taken = now - self._last
        self._last = now
        return taken

    def parts(self) -> list[int]:
        """Return the times in the order of `PARTS`, as `StepRecord` takes them; 0 for skipped parts."""
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


class Preparation(NamedTuple):
    """Work done ahead of steps, such as compilation.

    Attributes:
        num_functions: compiled functions.
        num_graphs: CUDA graphs.
        seconds: spent on compilation and capture, with the first calls.
    """

    num_functions: int = 0
    num_graphs: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        """Return one line; empty if nothing was prepared."""
        parts = [
            f"{count} {name}{'s' * (count > 1)}"
            for count, name in (
                (self.num_functions, "compiled function"),
                (self.num_graphs, "CUDA graph"),
            )
            if count
        ]
        return f"{' and '.join(parts)}, prepared in {self.seconds:.1f} s" if parts else ""


class DeviceDrafting(Protocol):
    """A drafter's part of a step, on tensors of the target model's device.

    Attributes:
        topology: of every draft, N nodes.
        num_candidates: number of likeliest tokens k that it learns from after every node.
    """

    topology: TreeTopology
    num_candidates: int

    def begin_step(self) -> None:
        """Copy to the device what steps on the host have learned since."""

    def fill(self, root: torch.Tensor) -> torch.Tensor:
        """Return the draft's token ids [N], given the root's []."""

    def learn(
        self,
        token_ids: torch.Tensor,
        candidates: torch.Tensor,
        logits: torch.Tensor,
        is_accepted: torch.Tensor,
    ) -> None:
        """Learn from the likeliest tokens [N, k] after every node, their logits, and which nodes were
        accepted [N].
        """

    def snapshot(self) -> Callable[[], None]:
        """Return a function that undoes everything learned from now on."""


class DeviceStep(Protocol):
    """A step that runs whole on the device: it replaces propose, forward pass, verify, keep and observe."""

    def fits(self, budget: DraftBudget, root: int) -> bool:
        """Whether the budget allows the draft after this root."""
        ...

    def run(self, root: int, cache: Any, room: int) -> tuple[DraftTree, Acceptance]:
        """Run a step of at most `room` tokens after `root`; the drafter learns within it."""
        ...
