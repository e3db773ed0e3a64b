"""Who is asked what, under which conditions, into which file: what all commands that answer hand on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from transformers import StopStringCriteria

from evaluation.answers.log import AnswerLog
from evaluation.inference.answering import Answerer, Asking
from evaluation.inference.client import Client
from evaluation.inference.config import RunConfig
from evaluation.questions.conversation import Conversation
from evaluation.questions.questions import Question
from model.api.prompts import stop_criterion
from model.backends.proofs.support import eos_ids_of
from model.backends.target import TargetModel
from model.commands.command_line import user_errors
from model.commands.loading import CheckedModel
from model.methods import Method
from model.options import Options

Memory = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class OtherProgram:
    """What answers beside our methods: transformers, llama.cpp or a server."""

    name: str

    is_served: ClassVar[bool] = False

    def config(self, draft_model: str | None) -> Options:
        """Return its options; `draft_model` is for one that drafts with a model."""
        raise NotImplementedError

    def check(self, run: RunConfig) -> None:
        """Refuse what it does not do by a `UserError`."""

    def circumstances(self) -> dict[str, Any]:
        """Return what the sidecar of its answers says instead."""
        return {}

    def answerer(self, plan: Plan, target: TargetModel | None) -> Answerer:
        """Return it ready to answer; `target` is the same model in our hands, if there is one."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Participant:
    """A participant of a comparison: a method, another program or a server, with its options."""

    words: str  # as it was named
    method: Method | OtherProgram
    config: Any
    # Whether it is the second run of the baseline: how far the two runs differ is the noise of the comparison.
    is_again: bool = False

    @property
    def label(self) -> str:
        """Its words as part of a file's name: "recycling-tree-version-2.2.2"."""
        words = f"{self.words}-again" if self.is_again else self.words
        return re.sub(r"[^\w.]+", "-", words).strip("-")

    @property
    def is_served(self) -> bool:
        """Whether a server answers."""
        return isinstance(self.method, OtherProgram) and self.method.is_served


class Asked(NamedTuple):
    """The questions of a run, and the model with its template; without these two where servers alone answer."""

    question_file: Path
    questions: Sequence[Question]
    model: CheckedModel | None = None
    conversation: Conversation | None = None


@dataclass(slots=True)
class Plan:
    """A participant's part of a run, checked as far as possible without the weights; may be sent to a worker."""

    participant: Participant
    run: RunConfig
    asked: Asked
    model_id: str
    log: AnswerLog
    start_memory: Memory = field(default_factory=dict)
    is_hot: bool = False  # whether the method keeps memory across questions
    threads: int | None = None  # CPU threads; None if the loaded model decides
    client: Client | None = None  # of a server

    @property
    def model(self) -> CheckedModel:
        assert self.asked.model is not None, "servers have their own"
        return self.asked.model

    @property
    def asking(self) -> Asking:
        """How questions are asked."""
        conversation = None if self.participant.is_served else self.asked.conversation
        choices, seed = self.run.answers.num_choices, self.run.sampling.seed
        return Asking(conversation, self.model_id, choices, seed)

    @property
    def remaining(self) -> list[Question]:
        """The questions that the answer file lacks."""
        return self.log.remaining(self.asked.questions)

    def memory(self) -> Memory | None:
        """Return the memory before the first question; None if every worker has a memory of its own.

        Raises:
            UserError: if questions were answered and their memory is missing.
        """
        if self.run.uses_ray and not (self.is_hot and self.run.workers.state_order == "single"):
            return None
        return self.log.memory() if self.is_hot and self.log.num_rows else self.start_memory

    def eos_ids(self, target: TargetModel) -> frozenset[int]:
        assert self.asked.conversation is not None, "servers have their own"
        return eos_ids_of(target.model, self.model.tokenizer) | self.asked.conversation.stop_ids

    def stop_criterion(self) -> StopStringCriteria | None:
        """Return the criterion of the run's stop strings; None if there are none."""
        with user_errors():
            return stop_criterion(self.run.sampling.stop, self.model.tokenizer, "")

    def longest_text(self) -> int:
        """Return the most tokens that a question can grow to: its turns, and an answer to each."""
        conversation, limit = self.asked.conversation, self.run.sampling.max_new_tokens
        assert conversation is not None, "servers have their own"
        return max(
            len(conversation.message_ids(question, len(question.turns) - 1)) + limit
            if question.messages
            else sum(
                len(conversation.prompt_ids([], turn, question.system)) + limit
                for turn in question.turns
            )
            for question in self.asked.questions
        )
