"""What a question says of its answers beforehand: a format or a call that they must be, a text that they resemble.

Its fields are those of requests in OpenAI's API: `response_format`, `tool_choice` and `prediction`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from evaluation.questions.questions import Question
from evaluation.questions.trajectories import asked_places
from model.api.expected import Grammar, GrammarSource, Prediction, guesses_of, prediction_ids
from model.api.tools import Tools
from model.commands.command_line import user_errors


class Known(NamedTuple):
    """What is known of one answer; None: nothing of that kind."""

    grammar: Grammar | None = None
    guesses: Callable[[Sequence[int]], Sequence[int]] | None = None  # as of a `Request`


def known_of(
    question: Question,
    turn: int,
    prompt_ids: Sequence[int],
    tokenizer: Any,
    vocab_size: int,
    ends: Collection[int],
) -> Known:
    """Return what is known of the answer to a turn's prompt; the arguments of a `Grammar` come last."""
    grammar, sources = None, list[Grammar | Prediction]()
    if (source := grammar_of(question, turn, tokenizer)) is not None:
        grammar = Grammar(source, tokenizer, vocab_size, ends).of_text(len(prompt_ids))
        sources.append(grammar)
    if question.predictions:
        ids = prediction_ids(question.predictions[turn], tokenizer, vocab_size)
        sources.append(Prediction(ids, len(prompt_ids)))
    return Known(grammar, guesses_of(sources))


def grammar_of(question: Question, turn: int, tokenizer: Any) -> GrammarSource | None:
    """Return the grammar of the answer to a turn; None if it is free."""
    form, choice = (
        request_of(question, turn).get(name) for name in ("response_format", "tool_choice")
    )
    if form is not None and form["type"] != "text":
        schema: GrammarSource = (
            form["json_schema"]["schema"] if "json_schema" in form else {"type": "object"}
        )
        return schema
    if choice in (None, "none", "auto"):
        return None
    name = choice["function"]["name"] if isinstance(choice, dict) else None
    return Tools(question.tools, tokenizer).grammar(name)


def request_of(question: Question, turn: int) -> dict[str, Any]:
    """Return the fields of a request for the answer to a turn; a trajectory's turns that were no calls are free."""
    fields = dict(question.fields)
    if "tool_choice" in fields:
        asked = question.messages[asked_places(question.messages)[turn]]
        fields["tool_choice"] = fields["tool_choice"] if asked.get("tool_calls") else "none"
    if question.predictions:
        fields["prediction"] = {"type": "content", "content": question.predictions[turn]}
    return fields


def check_known(questions: Sequence[Question], tokenizer: Any) -> None:
    """Refuse grammars that cannot be read, and functions that there are not, by a `UserError`."""
    with user_errors():
        for question in questions:
            if question.fields:
                for turn in range(len(question.turns)):
                    if (source := grammar_of(question, turn, tokenizer)) is not None:
                        Grammar(source, tokenizer, len(tokenizer), [tokenizer.eos_token_id])
