"""Drafters: the part of speculative decoding that guesses.

A drafter may be wrong, never unsafe: whatever it proposes, verification emits the target model's
own tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch

from .budget import DraftBudget
from .step import DeviceDrafting
from .target import TargetModel
from .tree import DraftTree
from .verification import Acceptance


@dataclass(frozen=True, slots=True)
class VerifiedStep:
    """What a drafter may learn from one step.

    Attributes:
        tree: the verified draft.
        acceptance: the accepted path, what was emitted along it, the likeliest tokens after every
            node, and its sketches.
        stop_reason: None while the text goes on, else as in `StepRecord`.
    """

    tree: DraftTree
    acceptance: Acceptance
    stop_reason: str | None


class Quirks(NamedTuple):
    """How a published code departs from exact limits and clean starts.

    Attributes:
        overrun: tokens past the limit until which steps go on, unseen.
        keeps_warmup: whether warm-up passes leave their mark on the measured run.
    """

    overrun: int = 0
    keeps_warmup: bool = False


class Drafter:
    """Base of all drafters: the lifecycle, with nothing to do by default.

    Three lifetimes: the frozen `config`; memory that lives across prompts (`memory`, cleared by
    `reset`); and the state of one sequence (cleared by `start`).

    Args:
        config: an instance of `config_class`.
        vocab_size: number of rows of the target model's output V.
        device: where the target model takes its token ids.
    """

    config_class: ClassVar[type]
    # Options that switch on the automatic node budget, such as {"budget": "auto"}; empty if there is none.
    auto_options: ClassVar[Mapping[str, str]] = {}
    # Nodes of the largest tree that `propose` returns, root included; sizes the KV cache.
    max_nodes: int = 1
    # Likeliest tokens that `observe` finds after every node (it may find one or two more).
    num_candidates: int = 0
    # Whether `observe` finds the sketches of every node (`read_out`).
    wants_sketches: bool = False
    # Whether `observe_prompt` wants the logits of the prompt's tokens; None: where they are cheap.
    harvests_prompt: bool | None = False
    # Whether memory is cleared between questions (a cold start each).
    is_cold: bool = False
    # Where the published code of the method, which is reproduced, departs from all others.
    quirks: Quirks = Quirks()

    def __init__(self, config: Any, vocab_size: int, device: torch.device) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.device = device

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Begin a sequence: clear the state of the previous one."""

    def observe_prompt(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        """Learn from a chunk of the prompt: its C tokens and the logits after each, [C, V]."""

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Return a draft whose root is `context[-1]`, inside the budget."""
        raise NotImplementedError

    def observe(self, step: VerifiedStep) -> None:
        """Learn from a verified step."""

    def on_device(self) -> DeviceDrafting | None:
        """Return this drafter's part of steps that run whole on the device, and take the place of
        `propose` and `observe`; None if it works on the host.
        """
        return None

    def for_target(self, target: TargetModel) -> Drafter:
        """Return the drafter that decodes with this target model: this one, or one around it."""
        return self

    def reset(self) -> None:
        """Forget everything, memory kept across prompts included."""

    def memory(self) -> dict[str, torch.Tensor]:
        """Return a copy of the memory kept across prompts, as named tensors; empty if there is none.

        What chains turned out to be worth, by which automatic budgets of pld, lookahead, samd and sps go, is no
        part of it: it is learned anew within some steps.
        """
        return {}

    def load_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what `memory` of an equally configured drafter returned.

        Raises:
            ValueError: if names, shapes or values do not fit this drafter.
        """
        if tensors:
            raise ValueError(
                f"memory: got {sorted(tensors)}; this method keeps nothing across prompts"
            )

    @classmethod
    def keeps_memory(cls) -> bool:
        """Whether the method has memory to keep across prompts."""
        return cls.memory is not Drafter.memory

    @classmethod
    def drafts_with_model(cls) -> bool:
        """Whether another model drafts, which its options name."""
        return "draft_model" in {option.name for option in fields(cls.config_class)}

    @property
    def is_hot(self) -> bool:
        """Whether memory lives on from question to question in a run."""
        return self.keeps_memory() and not self.is_cold

    def describe(self) -> str:
        """Return one line on size and memory for a log; empty if there is nothing to say."""
        return ""
