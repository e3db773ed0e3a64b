"""Prompts in the usual forms (text, chat messages, token ids, a tokenizer's output), as token ids; stop strings.

Shapes: P tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
import torch
from transformers import StoppingCriteriaList, StopStringCriteria

FORMS = (
    "text, chat messages, token ids, a tensor or array [P] or [1, P], or a tokenizer's output (one prompt, "
    "not a batch)"
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


def prompt_ids_of(prompt: Prompt, tokenizer: Any = None) -> list[int]:
    """Return the token ids of a prompt, without padding.

    Raises:
        ValueError: if its form is unknown, or it holds more than one prompt.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(
                "prompt: got text without a tokenizer; give the tokenizer or token ids"
            )
        return _one_row("prompt", tokenizer(prompt).input_ids)
    if isinstance(prompt, Sequence) and any(isinstance(part, Mapping) for part in prompt):
        return chat_ids(prompt, tokenizer)  # type: ignore[arg-type]  # the template sees what is none
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


def chat_ids(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[int]:
    """Return the token ids that ask for the next answer in a chat, by the tokenizer's template.

    A message's content may come in parts, as OpenAI's clients send it; parts of text are put together.

    Raises:
        ValueError: if the tokenizer has no template, or the template does not take these messages; for a
            part that is no text.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "prompt: got chat messages without a tokenizer that has a chat template; give text or token ids"
        )
    messages = [_with_joined_parts(message) for message in messages]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # Jinja's, or whatever a template raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"prompt: the chat template does not take these messages: {reason}; allowed: messages such as "
            '[{"role": "user", "content": "..."}]'
        ) from error
    # The template writes the special tokens itself.
    return list(tokenizer(text, add_special_tokens=False).input_ids)


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
    given = [strings] if isinstance(strings, str) else list(strings or ())
    if not all(isinstance(one, str) and one for one in given):
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
