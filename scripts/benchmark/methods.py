"""The methods and referees that the benchmark times, and what they must be given.

The referees are transformers' own `generate`, its prompt lookup and its assisted generation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from evaluation.questions.conversation import Conversation
from evaluation.questions.questions import Question
from model.commands.command_line import UserError, user_errors
from model.commands.loading import CheckedModel
from model.commands.model_options import DEFAULT_MODEL, DEMO_MODEL
from model.engine.drafter import Drafter
from model.engine.loop import generate
from model.engine.support import context_limit
from model.engine.target import TargetModel
from model.methods.registry import METHODS, drafter_class
from model.methods.sps.draft_model import check_draft_model, load_draft_model
from model.options import unknown_name
from scripts.benchmark.report import ASSISTED, PARTS, REFEREES, Answer

DEMO_DRAFT = str(DEMO_MODEL.with_name("draft"))
AUTO = "-auto"


class Method(NamedTuple):
    """Something that answers prompts.

    Attributes:
        answer: answers one prompt.
        reset: forgets what earlier prompts taught.
    """

    answer: Callable[[list[int]], Answer]
    reset: Callable[[], None]


class Setting(NamedTuple):
    """The model and the limits of a run, the same for all methods.

    Attributes:
        target: the target model.
        max_new_tokens: of an answer.
        eos_ids: tokens that end it.
        draft_model: folder or hub name of the model that some methods draft with, if there is one.
    """

    target: TargetModel
    max_new_tokens: int
    eos_ids: frozenset[int]
    draft_model: str | None = None


def drafter_of(name: str, also: Sequence[str] = ()) -> tuple[type[Drafter], dict[str, str]]:
    """Return the class and the options behind a method's name; NAME-auto has an automatic budget.

    Args:
        name: the method.
        also: names that an error says are allowed, too.

    Raises:
        UserError: if there is no such method.
    """
    base = name.removesuffix(AUTO)
    options = dict(drafter_class(base).auto_options) if base in METHODS else {}
    if base not in METHODS or (name != base and not options):
        known = [*METHODS, *(m + AUTO for m in METHODS if drafter_class(m).auto_options)]
        raise UserError(unknown_name("methods", name, [*known, *also]))
    return drafter_class(base), options if name != base else {}


def refuse_repeated(methods: Sequence[str]) -> None:
    """Raise UserError if a method is there twice: results go by its name."""
    if len(set(methods)) < len(methods):
        raise UserError(f"methods: got {' '.join(methods)}; allowed: each once")


def wants_draft_model(name: str) -> bool:
    """Return whether a method drafts with another model."""
    if name in REFEREES:
        return name == ASSISTED
    return drafter_of(name)[0].drafts_with_model()


def choose_draft_model(methods: Sequence[str], model_path: str, given: str | None) -> str | None:
    """Return the draft model: what was given, else the demo model's with the demo model; None if no
    method drafts with one.

    Raises:
        UserError: if there is none where one is wanted, or one is given for nothing.
    """
    wanting = [method for method in methods if wants_draft_model(method)]
    if not wanting:
        if given is not None:
            raise UserError(
                f"draft_model: got {given}; only sps and {ASSISTED} draft with it, add one to --methods"
            )
        return None
    if given is None and model_path != DEFAULT_MODEL:
        raise UserError(f"draft_model: got none; give the model that {wanting[0]} drafts with")
    return DEMO_DRAFT if given is None else given


def config_of(name: str, draft_model: str | None) -> Any:
    """Return the config of a method of ours, with its defaults.

    Raises:
        UserError: if the method cannot run here.
    """
    cls, options = drafter_of(name)
    if draft_model is not None and wants_draft_model(name):
        options["draft_model"] = draft_model
    with user_errors():
        return cls.config_class(**options)


def check_draft(draft_model: str | None, model: CheckedModel) -> None:
    """Raise UserError if a draft model was chosen that does not go with the target model."""
    if draft_model is not None and model.vocab_size is not None:
        with user_errors():
            check_draft_model(draft_model, model.vocab_size)


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


def our_method(setting: Setting, name: str) -> Method:
    """Return a method of ours with its defaults; its memory is hot within a repetition."""
    target, max_new_tokens, eos_ids, draft_model = setting
    cls, _ = drafter_of(name)
    drafter = cls(config_of(name, draft_model), target.vocab_size, target.device)

    def answer(prompt_ids: list[int]) -> Answer:
        target.synchronize()
        start = time.perf_counter()
        done = generate(target, drafter, prompt_ids, max_new_tokens=max_new_tokens, eos_ids=eos_ids)
        total = time.perf_counter() - start
        parts = {part: sum(getattr(step, part + "_ns") for step in done.steps) for part in PARTS}
        decode = total - done.steps[0].prefill_ns / 1e9
        num_nodes = sum(step.num_nodes for step in done.steps)
        return Answer(done.token_ids, total, decode, done.accept_lengths, parts, num_nodes)

    return Method(answer, drafter.reset)


def referee(setting: Setting, name: str) -> Method:
    """Return transformers' own generate: plain, with prompt lookup, or assisted by a draft model."""
    target, max_new_tokens, eos_ids, draft_model = setting
    options: dict[str, Any] = {}
    if name == "generate-pld":
        options["prompt_lookup_num_tokens"] = 10
    if name == ASSISTED:
        assert draft_model is not None, "main makes sure"
        options["assistant_model"] = load_draft_model(draft_model, "auto", target.device).model

    def answer(prompt_ids: list[int]) -> Answer:
        ids = torch.tensor([prompt_ids], device=target.device)
        # Transformers would go on past the model's context, where our methods stop.
        limit = target.context_limit(len(prompt_ids))
        room = max_new_tokens if limit is None else min(max_new_tokens, limit - len(prompt_ids))
        target.synchronize()
        start = time.perf_counter()
        with torch.inference_mode():
            output = target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=room,
                eos_token_id=sorted(eos_ids),
                pad_token_id=min(eos_ids, default=0),
                **options,
            )
        token_ids = output[0, len(prompt_ids) :].tolist()
        return Answer(token_ids, time.perf_counter() - start)

    return Method(answer, lambda: None)
