"""Vanilla: plain autoregressive decoding, as the empty draft in the loop of every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...engine.budget import DraftBudget
from ...engine.drafter import Drafter, Needs, VerifiedStep
from ...engine.tree import DraftTree
from ...options import Options


@dataclass(frozen=True, slots=True)
class VanillaConfig(Options):
    """Vanilla has no options."""


class VanillaDrafter(Drafter):
    """Drafts nothing: the tree is the root alone."""

    config_class = VanillaConfig
    needs = Needs(reads_rejected=False)

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        return DraftTree.chain([context[-1]])

    def observe(self, step: VerifiedStep) -> None:
        """Learn nothing; here, so that a plain step is read without the file of all drafters."""
