"""Prompts in the usual forms (text, chat messages, token ids, a tokenizer's output), as token ids; stop strings.

Shapes: P tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
import torch
from transformers import StoppingCriteriaList, StopStringCriteria

from .tools import HERMES, reads_tools, told_in_words

FORMS = (
    "text, chat messages, token ids, a tensor or array [P] or [1, P], or a tokenizer's output (one prompt; "
    "several: generate_all(prompts))"
)
# Variables of chat templates that are no caller's.
OWN_VARIABLES = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
)
# Text; chat messages; token ids as a sequence, a tensor or an array [P] or [1, P]; a tokenizer's output.
Prompt: TypeAlias = (
    str
    | Sequence[Mapping[str, Any]]
    | Sequence[SupportsIndex]
    | Sequence[Sequence[SupportsIndex]]
    | torch.Tensor
    | np.ndarray[Any, Any]
    | Mapping[str, Any]
)


def prompt_ids_of(prompt: Prompt, tokenizer: Any = None, **of_chat: Any) -> list[int]:
    """Return the token ids of a prompt, without padding; `of_chat` are further arguments of `chat_ids`.

    Raises:
        ValueError: if its form is unknown, it holds more than one prompt, or gets what is for chats alone.
    """
    if isinstance(prompt, Sequence) and any(isinstance(part, Mapping) for part in prompt):
        return chat_ids(prompt, tokenizer, **of_chat)  # type: ignore[arg-type]  # the template sees what is none
    for name in of_chat:
        raise ValueError(
            f"{name}: got it with a prompt that is no chat; allowed: with chat messages"
        )
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(
                "prompt: got text without a tokenizer; give the tokenizer or token ids"
            )
        return _tokens(prompt, tokenizer)
    values, mask = prompt, None
    if isinstance(prompt, Mapping):
        if "input_ids" not in prompt:
            raise ValueError(f"prompt: got {sorted(prompt)}; allowed: {FORMS}")
        values, mask = prompt["input_ids"], prompt.get("attention_mask")
    ids = _one_row("prompt", values)
    if mask is None:
        return ids
    seen = _one_row("attention_mask", mask, (Integral, bool, np.bool_))
    return ids[num_padding(seen, len(ids)) :]


def chat_ids(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    tools: Sequence[Any] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
    continue_final_message: bool | None = None,
) -> list[int]:
    """Return the token ids that ask for the next answer in a chat, by the tokenizer's template.

    A message's content may come in parts, as OpenAI's clients send it; parts of text are put together.

    Args:
        messages: at least one.
        tokenizer: has the template.
        tools: functions or JSON schemas; told in words where the template reads none (`model.api.tools`).
        chat_template_kwargs: further variables of the template.
        continue_final_message: of a chat that ends with the assistant's message: whether the text goes on with it.

    Raises:
        ValueError: if the tokenizer has no template, or the template does not take these messages, or reads no
            such variable; for a part that is no text; for a chat that ends with the assistant and does not say
            what follows.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "prompt: got chat messages without a tokenizer that has a chat template; give text or token ids"
        )
    messages, variables = list(map(_with_joined_parts, messages)), dict(chat_template_kwargs or {})
    template: str = tokenizer.get_chat_template(tools=list(tools) or None)
    for name in variables:
        if name not in template or name in OWN_VARIABLES:
            raise ValueError(
                f"{name}: got it for a chat template that does not read it; leave it out"
            )
    is_open = isinstance(messages[-1], Mapping) and messages[-1].get("role") == "assistant"
    if (is_open and continue_final_message is None) or (continue_final_message and not is_open):
        raise ValueError(
            f"continue_final_message: got {continue_final_message} for a chat that ends with the "
            f"{'assistant' if is_open else 'user'}; allowed: True, to go on with the assistant's last message, or "
            "False, to begin another"
        )
    is_told = bool(tools) and not reads_tools(template)
    try:
        if is_told:
            messages, tools = told_in_words(messages, tools), ()
        text = tokenizer.apply_chat_template(
            [{**one} for one in messages],  # older versions pass over what is no message
            tools=list(tools) or None,
            add_generation_prompt=not continue_final_message,
            continue_final_message=bool(continue_final_message),
            tokenize=False,
            **variables,
        )
    except Exception as error:  # Jinja's, or whatever a template raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"prompt: the chat template does not take these messages: {reason}; allowed: messages such as "
            '[{"role": "user", "content": "..."}]'
        ) from error
    if is_told and HERMES.opening not in text:
        raise ValueError(
            "tools: the chat template reads neither tools nor the system message; leave them out"
        )
    # The template writes the special tokens itself.
    return _tokens(text, tokenizer, add_special_tokens=False)


def _tokens(text: str, tokenizer: Any, **words: Any) -> list[int]:
    if not is_utf8(text):
        raise ValueError(
            "prompt: got text with lone surrogates; allowed: text that UTF-8 can write, such as "
            'text.encode("utf-8", "replace").decode()'
        )
    return _one_row("prompt", tokenizer(text, **words).input_ids)


def is_utf8(text: str) -> bool:
    """Whether a text can be written in UTF-8, as all but one with lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _with_joined_parts(message: Any) -> Any:
    """Return a message whose content, if it is a list of parts, is their text."""
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, list | tuple):
        return message
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"prompt: got a content part of type {kind}; allowed: parts of text: "
                '{"type": "text", "text": "..."}'
            )
    return {**message, "content": "".join(part["text"] for part in parts)}


def num_padding(mask: Sequence[int], length: int) -> int:
    """Return the number of tokens before a prompt that its attention mask leaves out; ValueError for any others."""
    num_unseen = len(mask) - sum(map(bool, mask))
    if len(mask) != length or any(mask[:num_unseen]):
        raise ValueError(
            "attention_mask: got a mask that hides tokens after the first one seen, or of another "
            "length than the prompt; allowed: padding on the left (without a mask, transformers "
            "hides every token that equals the padding token: give torch.ones_like(input_ids))"
        )
    return num_unseen


def _one_row(what: str, values: Any, kinds: tuple[type, ...] = (Integral,)) -> list[int]:
    """Return a list of integers from a sequence, or from a tensor or array [P] or [1, P]."""
    values = _as_list(values)
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise ValueError(f"{what}: got {type(values).__name__}; allowed: {FORMS}")
    if len(values) == 1:
        row = _as_list(values[0])
        values = row if isinstance(row, list | tuple) else values
    values = [_as_list(value) for value in values]
    for value in values:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            given = f"{len(values)} rows" if isinstance(value, list | tuple) else repr(value)
            raise ValueError(f"{what}: got {given} where an integer belongs; allowed: {FORMS}")
    return [int(value) for value in values]


def _as_list(values: Any) -> Any:
    """Return a tensor's or an array's numbers; all else as it is."""
    return values.tolist() if isinstance(values, torch.Tensor | np.ndarray) else values


def stop_criterion(
    strings: str | Sequence[str] | None, tokenizer: Any, without_tokenizer: str
) -> StopStringCriteria | None:
    """Return the criterion that ends a text after one of these strings; None if there are none.

    Raises:
        ValueError: if a string is empty or no string; without a tokenizer, which `without_tokenizer` says.
    """
    is_one = isinstance(strings, str) or not isinstance(strings, Iterable | None)
    given = [strings] if is_one else list(strings or ())
    if not all(isinstance(one, str) and one and is_utf8(one) for one in given):
        raise ValueError(
            f"stop_strings: got {strings!r}; allowed: one text or several, none of them empty"
        )
    if given and tokenizer is None:
        raise ValueError(f"stop_strings: got strings without a tokenizer; {without_tokenizer}")
    return StopStringCriteria(tokenizer, given) if given else None


def ends_text(
    criterion: StopStringCriteria | None, device: torch.device
) -> Callable[[Sequence[int]], bool] | None:
    """Return whether a text ends after its last token, as a function; None without a criterion."""
    if criterion is None:
        return None
    criteria = StoppingCriteriaList([criterion])
    return lambda text: bool(criteria(torch.tensor([text], device=device), None))
