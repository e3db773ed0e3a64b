"""Prompts in the usual forms (text, chat messages, token ids, tokenizer output), as token ids.

Shapes: P tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

FORMS = (
    "text, chat messages, token ids, a tensor [P] or [1, P], or a tokenizer's output (one prompt, not a "
    "batch)"
)


def prompt_ids_of(prompt: Any, tokenizer: Any = None) -> list[int]:
    """Return the token ids of a prompt, without padding.

    Raises:
        ValueError: if its form is unknown, or it holds more than one prompt.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(
                "prompt: got text without a tokenizer; give the tokenizer or token ids"
            )
        return list(tokenizer(prompt).input_ids)
    if isinstance(prompt, Sequence) and any(isinstance(part, Mapping) for part in prompt):
        return chat_ids(prompt, tokenizer)
    mask = None
    if isinstance(prompt, Mapping):
        if "input_ids" not in prompt:
            raise ValueError(f"prompt: got {sorted(prompt)}; allowed: {FORMS}")
        prompt, mask = prompt["input_ids"], prompt.get("attention_mask")
    ids = _one_row("prompt", prompt)
    return ids if mask is None else ids[num_padding(_one_row("attention_mask", mask), len(ids)) :]


def chat_ids(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[int]:
    """Return the token ids that ask for the next answer in a chat, by the tokenizer's template.

    Raises:
        ValueError: if the tokenizer has no template, or the template does not take these messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "prompt: got chat messages without a tokenizer that has a chat template; give text or token ids"
        )
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # Jinja's, or whatever a template raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"prompt: the chat template does not take these messages: {reason}; allowed: such as "
            '[{"role": "user", "content": "..."}]'
        ) from error
    # The template writes the special tokens itself.
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def num_padding(mask: Sequence[int], length: int) -> int:
    """Return the number of tokens before a prompt that its attention mask leaves out.

    Raises:
        ValueError: if it leaves out any other token.
    """
    num_unseen = len(mask) - sum(map(bool, mask))
    if len(mask) != length or any(mask[:num_unseen]):
        raise ValueError(
            "attention_mask: got a mask that hides tokens after the first one seen, or of another "
            "length than the prompt; allowed: padding on the left (without a mask, transformers "
            "hides every token that equals the padding token: give torch.ones_like(input_ids))"
        )
    return num_unseen


def _one_row(what: str, values: Any) -> list[int]:
    """Return a list of integers from a sequence, or from a tensor [P] or [1, P]."""
    if isinstance(values, torch.Tensor):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise ValueError(f"{what}: got {type(values).__name__}; allowed: {FORMS}")
    if len(values) == 1 and isinstance(values[0], Sequence):
        values = values[0]
    if not all(isinstance(value, int) for value in values):
        raise ValueError(f"{what}: got {len(values)} rows or no integers; allowed: {FORMS}")
    return list(values)
