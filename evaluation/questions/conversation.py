"""From question turns to prompt tokens, and from answer tokens to text, as Spec-Bench does it.

The template is fastchat's for models that it knows by their own name (Vicuna and its kin), else the
chat template that comes with the tokenizer.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastchat.conversation import conv_templates, get_conv_template

from evaluation.questions.questions import Question
from evaluation.questions.trajectories import arguments_of, text_of
from model.api.tools import reads_tools, told_in_words
from model.commands.command_line import UserError, first_line
from model.options import unknown_name

# Models whose own prompt format is this fastchat template. Others carry theirs in the tokenizer.
FASTCHAT_NAMES = (
    (re.compile(r"vicuna|longchat"), "vicuna_v1.1"),
    (re.compile(r"llama-?2.*chat|code-?llama.*instruct"), "llama-2"),
)

# A system prompt to look for in a prompt.
SYSTEM = "Answer."


class Message(NamedTuple):
    """One finished exchange: what the user said, and the answer."""

    user: str
    assistant: str


class Conversation(ABC):
    """Renders prompts for one model and reads its answers."""

    name: str
    stop_ids: frozenset[int] = frozenset()
    # Whether the tokenizer puts its special tokens before a prompt: a chat template writes them itself.
    adds_special_tokens = True

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @abstractmethod
    def prompt(self, history: Sequence[Message], user: str, system: str | None = None) -> str:
        """Return the prompt for the turn `user` after `history`; without `system`, with the template's own."""

    @abstractmethod
    def message_prompt(self, question: Question, turn: int) -> str:
        """Return the prompt of a trajectory's turn.

        A `UserError` if the template is not for messages of any role.
        """

    def prompt_ids(
        self, history: Sequence[Message], user: str, system: str | None = None
    ) -> list[int]:
        """Return the token ids of a prompt."""
        return self.ids(self.prompt(history, user, system))

    def text(self, token_ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, spaces_between_special_tokens=False
        )
        return text.strip()

    def ids(self, prompt: str) -> list[int]:
        return self._tokenizer(prompt, add_special_tokens=self.adds_special_tokens).input_ids


class ChatTemplateConversation(Conversation):
    """The tokenizer's own chat template."""

    name = "tokenizer"
    adds_special_tokens = False

    def prompt(self, history: Sequence[Message], user: str, system: str | None = None) -> str:
        said = [] if system is None else [("system", system)]
        for message in history:
            said += [("user", message.user), ("assistant", message.assistant)]
        return self._rendered(
            [{"role": role, "content": text} for role, text in (*said, ("user", user))]
        )

    def message_prompt(self, question: Question, turn: int) -> str:
        messages = [_for_template(message) for message in question.before(turn)]
        tools = list(question.tools)
        if tools and not reads_tools(self._tokenizer.get_chat_template(tools=tools)):
            messages, tools = told_in_words(messages, tools), []
        return self._rendered(messages, tools=tools or None)

    def _rendered(self, messages: list[dict[str, Any]], **tools: Any) -> str:
        prompt: str = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **tools
        )
        return prompt


class FastchatConversation(Conversation):
    """A template of fastchat, rendered and cut as in Spec-Bench."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        super().__init__(tokenizer)
        self.name = name
        template = get_conv_template(name)
        self.stop_ids = frozenset(template.stop_token_ids or ())
        stop = template.stop_str
        self._stop_strings = [stop] if isinstance(stop, str) else list(stop or ())

    def prompt(self, history: Sequence[Message], user: str, system: str | None = None) -> str:
        template = get_conv_template(self.name)
        if system is not None:
            template.set_system_message(system)
        template.messages = []  # some templates begin with an example exchange
        for message in history:
            template.append_message(template.roles[0], message.user)
            template.append_message(template.roles[1], message.assistant)
        template.append_message(template.roles[0], user)
        template.append_message(template.roles[1], None)
        prompt: str = template.get_prompt()
        return prompt

    def message_prompt(self, question: Question, turn: int) -> str:
        raise UserError(
            f"conv_template: got {self.name} with trajectories of messages; allowed: tokenizer, for a model with a "
            "chat template"
        )

    def text(self, token_ids: Sequence[int]) -> str:
        text = super().text(token_ids)
        for stop in self._stop_strings:
            if text.find(stop) > 0:
                text = text[: text.find(stop)].strip()
        if self.name == "xgen":
            text = text.removeprefix("Assistant:").strip()
        return text


def choose_conversation(template: str, model_path: str, tokenizer: Any) -> Conversation:
    """Return the conversation of `--conv-template`: "auto", "tokenizer", or a fastchat template's name.

    Raises:
        UserError: if the name is unknown, the tokenizer has no chat template where it is needed, or
            the template makes no prompt of a question.
    """
    if template == "auto":
        model_name = Path(model_path).name.lower()
        known = [name for pattern, name in FASTCHAT_NAMES if pattern.search(model_name)]
        template = known[0] if known else "tokenizer"
    if template == "tokenizer":
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"conv_template: the tokenizer of {model_path} has no chat template; give a fastchat template, "
                "for example --conv-template vicuna_v1.1 (or raw: the bare question)"
            )
        conversation: Conversation = ChatTemplateConversation(tokenizer)
    elif template in conv_templates:
        conversation = FastchatConversation(tokenizer, template)
    else:
        raise UserError(
            unknown_name("conv_template", template, ["auto", "tokenizer", *conv_templates])
        )
    try:  # some of fastchat's are for services, not for models
        conversation.prompt_ids([], "Who?")
    except Exception as error:  # Jinja's, or whatever a template raises
        raise UserError(
            f"conv_template: {conversation.name}, for {model_path}, makes no prompt of a question: "
            f"{first_line(error)}; give another one, for example --conv-template vicuna_v1.1"
        ) from error
    return conversation


def check_system(
    conversation: Conversation, questions: Sequence[Question], model_path: str
) -> None:
    """Refuse by a `UserError` a template that drops system prompts, or fails with them, if a question has one."""
    if all(question.system is None for question in questions):
        return
    why = "leaves it out"
    try:
        if SYSTEM in conversation.prompt([], "Who?", SYSTEM):
            return
    except Exception as error:  # Jinja's, or whatever a template raises
        why = f"says: {first_line(error)}"
    raise UserError(
        f"system_prompt: {conversation.name}, the template for {model_path}, {why}; leave --system-prompt "
        "and the questions' 'system' out, or give another --conv-template"
    )


def asked_ids(
    conversation: Conversation, question: Question, turn: int, history: Sequence[Message]
) -> list[int]:
    """Return the token ids of a turn's prompt: after what was said before, or in a trajectory as it was."""
    if question.messages:
        return conversation.ids(conversation.message_prompt(question, turn))
    return conversation.prompt_ids(history, question.turns[turn], question.system)


def check_messages(conversation: Conversation, questions: Sequence[Question]) -> None:
    """Refuse trajectories whose tools or tool calls the template leaves out: the prompt would be another one."""
    for question in questions:
        if not question.messages:
            continue
        last = len(question.turns) - 1
        try:
            prompt = conversation.message_prompt(question, last)
        except UserError:
            raise
        except Exception as error:  # Jinja's, or whatever a template raises
            raise UserError(
                f"question {question.question_id!r}: the chat template says: {first_line(error)}"
            ) from error
        calls = (call for one in question.before(last) for call in one.get("tool_calls") or ())
        names = Counter(part["function"]["name"] for part in (*question.tools, *calls))
        if missing := [name for name, count in names.items() if prompt.count(name) < count]:
            raise UserError(
                f"question {question.question_id!r}: the chat template leaves out {missing[0]}, a tool or a call "
                "of one; give a model whose template has them"
            )


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as templates take it: with one text, and arguments of calls as an object."""
    found = {**message, "content": text_of(message.get("content"))}
    if calls := message.get("tool_calls"):
        functions = [call["function"] for call in calls]
        found["tool_calls"] = [
            {**call, "function": {**one, "arguments": arguments_of(one["arguments"])}}
            for call, one in zip(calls, functions, strict=True)
        ]
    return found
