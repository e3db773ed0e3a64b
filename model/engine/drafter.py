"""Drafters: the part of speculative decoding that guesses.

A drafter may be wrong, never unsafe: whatever it proposes, verification emits the target model's
own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from .budget import DraftBudget
from .tree import DraftTree, TreeTopology
from .verification import Acceptance

if TYPE_CHECKING:  # Python 3.10 has none
    from typing import Self

# Options that name what a method drafts with beside the sequence: a smaller model, a datastore, trained heads.
DRAFTS_WITH = ("draft_model", "datastore", "heads")


@dataclass(frozen=True, slots=True)
class VerifiedStep:
    """One verified step, from which a drafter learns.

    Attributes:
        tree: the verified draft.
        acceptance: the accepted path, what was emitted along it, the likeliest tokens after every
            node, and its logit samples.
        stop_reason: None while the sequence goes on, else as in `StepRecord`.
        hidden: the hidden states of every node, [N, W * D], the drafter's W layers side by side; None if it
            wants none.
    """

    tree: DraftTree
    acceptance: Acceptance
    stop_reason: str | None
    hidden: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """Needs of a drafter: of the loop, the target model and the run.

    Attributes:
        num_candidates: candidates that `observe` gets after every node (it may get one or two more).
        reads_rejected: whether `observe` reads what the model says after nodes that were not accepted.
        logit_samples: whether `observe` gets the logit samples of every node (`read_out`).
        hidden_layers: hidden states that `observe` and `observe_prompt_hidden` get: -1 the final, normed ones
            (the output head's input), i those that layer i reads. With any, every prompt is read whole.
        hidden_size: hidden size D that the target model must have; None: any.
        prompt_logits: whether `observe_prompt` gets the logits of the prompt's tokens; None: where they are
            cheap.
        cheap_head: share of the model's weights up to which an output head is cheap to run on the whole
            prompt: no later step repays one that is a large part of the model.
        cold_start: whether memory is cleared between questions.
        warmup_memory: whether memory from the warm-up stays for the measured run, as in a published code.
        probes: whether drafts have probes (`DraftTree.probe`).
        overrun: tokens past the limit that are decoded unseen, as in a published code.
        draws: whether drafts are drawn where the text is (`DraftTree.drawn`): the text then is another draw from
            the same distribution than plain decoding's with the same seed.
    """

    num_candidates: int = 0
    reads_rejected: bool = True
    logit_samples: bool = False
    hidden_layers: tuple[int, ...] = ()
    hidden_size: int | None = None
    prompt_logits: bool | None = False
    cheap_head: float = 0.1
    cold_start: bool = False
    warmup_memory: bool = False
    probes: bool = False
    overrun: int = 0
    draws: bool = False

    def wants_prompt_logits(self, head_share: float) -> bool:
        """Whether `observe_prompt` is called for a model whose output head has this share of its weights."""
        if self.prompt_logits is None:
            return head_share <= self.cheap_head
        return self.prompt_logits


class Drafter:
    """Base of all drafters; every method of the lifecycle does nothing by default.

    Three lifetimes: the frozen `config`; memory that lives across prompts (`memory`, cleared by
    `reset`); and the state of one sequence (cleared by `start`).

    Args:
        config: an instance of `config_class`.
        vocab_size: number of rows of the target model's output V.
        device: of the target model's token ids.
    """

    config_class: ClassVar[type]
    # Options that switch on the automatic node budget, such as {"budget": "auto"}; empty if there is none.
    auto_options: ClassVar[Mapping[str, str]] = {}
    # Nodes of the largest tree that `propose` returns, root included; sizes the KV cache.
    max_nodes: int = 1
    needs: Needs = Needs()

    def __init__(self, config: Any, vocab_size: int, device: torch.device) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.device = device

    def sibling(self) -> Self:
        """Return a drafter for another sequence: it shares config and memory with this one, and begins with
        `start`.

        What one learns, all know. Steps of their sequences come in any order: all may propose before one observes.
        So `start` must leave the sequences of the others alone; `reset` and `load_memory` change the memory of all,
        and sequences under way go on.

        This one shares every object of the drafter. That is right if `start` replaces all that belongs to a
        sequence, and if `reset` and `load_memory` replace nothing that is shared, but change it in place.
        """
        return copy(self)

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Begin a sequence: clear the state of the previous one."""

    def observe_prompt(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        """Learn from a chunk of the prompt: its C tokens and the logits after each, [C, V]."""

    def observe_prompt_hidden(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        """Learn from a chunk of the prompt (up to its last token): C tokens and their hidden states, [C, W * D]."""

    def hint(self, tokens: Sequence[int]) -> None:
        """Take tokens that probably follow the sequence, as a grammar or a predicted text has them; none: no guess.

        Called before every `propose` and `offer` of a request that has `guesses`.
        """

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Return a draft whose root is `context[-1]`, inside the budget."""
        raise NotImplementedError

    def offer(
        self, context: Sequence[int], budget: DraftBudget, most: int, least: float = 0.0
    ) -> Sequence[float] | None:
        """Draft without choosing the number of nodes, which depends on the other sequences of a pass.

        Asked, in the place of `propose`, of drafters with `wants_costs`; the budget is without costs. At most
        `most` nodes are drafted; one less probable than `least` need not be offered. `take` follows.

        Returns:
            The probability of each drafted node that it is accepted, in falling order: any number of the first
            ones is a tree. None if this drafter cannot say; then `propose` is called.
        """
        return None

    def take(self, count: int) -> DraftTree:
        """Return the tree of the first `count` nodes offered; 0: the root alone. `observe` follows."""
        raise NotImplementedError

    def observe(self, step: VerifiedStep) -> None:
        """Learn from a verified step."""

    def skip(self, tokens: Sequence[int]) -> None:
        """Take the new tokens of a step of the root alone, for which `propose` was not called.

        `observe` is not called either, unless the drafter reads hidden states (`needs.hidden_layers`): it misses
        no row of the sequence, and observes such a step too.
        """

    def on_device(self) -> DeviceDrafting | None:
        """Return this drafter's part of steps that run whole on the device; None if it works on the
        host. Such steps replace `propose` and `observe`.
        """
        return None

    def for_target(self, target: Any) -> Drafter:
        """Return the drafter to use with this target model: this one, or a wrapper around it."""
        return self

    @property
    def draft_sizes(self) -> Collection[int]:
        """Numbers of nodes that drafts may have, so that passes of these sizes can be prepared."""
        return range(1, self.max_nodes + 1)

    def prepare(self, target: Any, num_tokens: int) -> None:
        """Prepare a target model, and a draft model, for drafts after sequences of up to `num_tokens` tokens: no
        later step captures a graph.
        """
        needs = self.needs
        target.expect_reads(needs.num_candidates, needs.logit_samples, needs.hidden_layers)
        target.warm_up(num_tokens, self.draft_sizes)

    def check_target(self, target: Any) -> None:
        """Raise ValueError if this drafter cannot draft for a target model, whose vocabulary fits.

        As when it has another hidden size, shows no hidden states to one that reads them, or reads no probes.
        """
        self.check_config(target.config)
        if self.needs.hidden_layers:
            target.hidden_states(self.needs.hidden_layers)
        if self.needs.probes:
            target.check_probes()

    def check_config(self, config: Any) -> None:
        """Raise ValueError if the target model's text config, known before its weights, has another hidden size."""
        found, needed = getattr(config, "hidden_size", None), self.needs.hidden_size
        if needed is not None and found != needed:
            raise ValueError(
                f"model: has a hidden size of {found}; allowed: {needed}, for which the heads were "
                "trained; give heads of this model"
            )

    def reset(self) -> None:
        """Forget everything, memory kept across prompts included."""

    def memory(self) -> dict[str, torch.Tensor]:
        """Return a copy of the memory kept across prompts, as named tensors; empty if there is none.

        Learned acceptance of chains, for automatic budgets, is not part of it: a few steps learn it again.
        """
        return {}

    def load_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the `memory` of an equally configured drafter.

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
    def drafts_with(cls) -> str:
        """Return the option of `DRAFTS_WITH` that names what drafts; empty if the sequence alone does."""
        options = {option.name for option in fields(cls.config_class)}
        return next((name for name in DRAFTS_WITH if name in options), "")

    @property
    def is_hot(self) -> bool:
        """Whether memory lives on from question to question in a run."""
        return self.keeps_memory() and not self.needs.cold_start

    @property
    def has_unsaved_memory(self) -> bool:
        """Whether `reset` forgets something across questions that no `memory` saves.

        What a `reset` of this package forgets beside a memory is learned again in a few steps.
        """
        forgets = not type(self).reset.__module__.startswith(__name__.partition(".")[0] + ".")
        return forgets and not self.keeps_memory() and not self.needs.cold_start

    def describe(self) -> str:
        """Return one line on size and memory for a log; empty if there is nothing to say."""
        return ""


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
