"""A step that runs whole on the device: what drafter and target model say of it.

Shapes: N nodes, k candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..budget import DraftBudget
from ..tree import DraftTree, TreeTopology
from ..verification import Acceptance


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
