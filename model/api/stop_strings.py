"""Stop strings: a text ends after the token that completes one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import StoppingCriteriaList, StopStringCriteria


def stop_criterion(
    strings: str | Sequence[str] | None, tokenizer: Any, without_tokenizer: str
) -> StopStringCriteria | None:
    """Return the criterion that ends a text after one of these strings; None if there are none.

    Args:
        strings: one or several.
        tokenizer: of the model.
        without_tokenizer: end of the error's text if there is no tokenizer.

    Raises:
        ValueError: if a string is empty or no string, or the tokenizer is missing.
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
