"""Entrants on a loaded model, ready to be timed, and the prompts that they get."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from evaluation.answering.entrants import Entrant
from evaluation.answering.method import MethodAnswerer
from evaluation.answering.referees import Referee, RefereeAnswerer
from evaluation.answers.row import Turn
from evaluation.questions.conversation import Conversation
from evaluation.questions.questions import Question
from model.commands.command_line import UserError, user_errors
from model.commands.loading import CheckedModel
from model.commands.matrix_file import make_drafter
from model.commands.model_options import SamplingOptions
from model.engine.support import context_limit
from model.engine.target import TargetModel
from model.methods.sps.draft_model import check_draft_model


class Method(NamedTuple):
    """An entrant that answers prompts.

    Attributes:
        answer: answers one prompt.
        reset: forgets what earlier prompts taught.
        prepare: prepares steps after texts of up to so many tokens.
    """

    answer: Callable[[list[int]], Turn]
    reset: Callable[[], None]
    prepare: Callable[[int], None] = lambda num_tokens: None


def ready(
    entrant: Entrant, target: TargetModel, sampling: SamplingOptions, eos_ids: frozenset[int]
) -> Method:
    """Return an entrant on a loaded model; its memory is hot until it is reset.

    Raises:
        UserError: if it does not go with the model.
    """
    if isinstance(entrant.method, Referee):
        limit = sampling.max_new_tokens
        return Method(RefereeAnswerer(target, entrant.config, limit, eos_ids).answer, lambda: None)
    drafter = make_drafter(entrant.method, entrant.config, target.vocab_size, target.device, {})
    answerer = MethodAnswerer(target, drafter, sampling, eos_ids)
    return Method(answerer.answer, drafter.reset, partial(drafter.prepare, target))


def check_draft_models(entrants: Sequence[Entrant], model: CheckedModel) -> None:
    """Raise UserError if a draft model, or heads, do not go with the target model."""
    for entrant in entrants:
        _check_heads(entrant, model)
        draft_model = getattr(entrant.config, "draft_model", None)
        if draft_model is not None and model.vocab_size is not None:
            with user_errors():
                check_draft_model(draft_model, model.vocab_size)


def _check_heads(entrant: Entrant, model: CheckedModel) -> None:
    """Raise UserError if an entrant drafts with heads that do not go with the model."""
    method, vocab_size = entrant.method, model.vocab_size
    if (
        isinstance(method, Referee)
        or method.drafter_class.drafts_with() != "heads"
        or not vocab_size
    ):
        return
    # On the CPU: the weights of the model need the device's memory.
    drafter = make_drafter(method, entrant.config, vocab_size, torch.device("cpu"), {})
    with user_errors():
        drafter.check_config(model.hf_config.get_text_config(decoder=True))


def first_prompts(
    conversation: Conversation, questions: Sequence[Question], model: CheckedModel
) -> list[list[int]]:
    """Return the prompts of the questions' first turns.

    Raises:
        UserError: one leaves the model no room for an answer.
    """
    prompts = []
    for question in questions:
        prompts.append(conversation.prompt_ids([], question.turns[0]))
        length = len(prompts[-1])
        limit = context_limit(model.hf_config.get_text_config(decoder=True), length)
        if not 1 <= length < (limit or math.inf):
            raise UserError(
                f"question {question.question_id!r}: got a prompt of {length} tokens; allowed: 1 or more"
                + (f", fewer than the model's context of {limit}" if limit else "")
                + "; leave the question out"
            )
    return prompts
