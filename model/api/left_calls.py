"""Calls that are left to transformers' own `generate` where they can be, since it does more with them."""

from __future__ import annotations

from collections.abc import Sequence

from ..engine.packing import why_not_packed
from ..engine.request import Request
from ..engine.target import TargetModel
from .generate_arguments import UnsupportedCallError
from .prepared_call import PreparedCall


def refuse_past_context(target: TargetModel, requests: Sequence[Request]) -> None:
    """Refuse texts that may grow longer than the model's context, where they would end.

    Raises:
        UnsupportedCallError: for the first such text.
    """
    for request in requests:
        num_tokens = len(request.prompt_ids)
        limit, context = num_tokens + request.max_new_tokens, target.context_limit(num_tokens)
        if context is not None and limit > context:
            raise UnsupportedCallError(
                "max_length",
                f"max_length: got {limit} tokens, prompt included; allowed: the model's context of {context}",
            )


def refuse_in_turn(target: TargetModel, call: PreparedCall) -> None:
    """Refuse several prompts whose texts would be decoded in turn: transformers' share passes.

    Raises:
        UnsupportedCallError: for such a call.
    """
    if call.num_prompts > 1 and (why := why_not_packed(target)):
        raise UnsupportedCallError(
            "input_ids",
            f"input_ids: got shape {list(call.input_ids.shape)}; allowed: one prompt with this model: {why}",
        )
