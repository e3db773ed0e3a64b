"""A padded batch of transformers' `generate`: each row is decoded as a text of a batch, and padded again.

Shapes: B prompts, P tokens of each, padding included, n new tokens of the longest text.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import torch

from ..engine.request import Request
from ..engine.step import StepRecord
from .base_decoder import BaseDecoder


def decode_rows(decoder: BaseDecoder, requests: Sequence[Request]) -> list[list[StepRecord]]:
    """Decode texts side by side; return the steps of each.

    Raises:
        Exception: what the first text that fails raises; the others are given up.
    """
    requests = [request.checked(decoder.target) for request in requests]
    steps: list[list[StepRecord]] = [[] for _ in requests]
    with closing(decoder.batch(len(requests))) as batch:
        for row, request in enumerate(requests):
            batch.add(row, request)
        while len(batch):
            for row, record, error in batch.step():
                if error is not None:
                    raise error
                if record is not None:
                    steps[row].append(record)
    return steps


def with_answers(
    input_ids: torch.Tensor, answers: Sequence[Sequence[int]], padding: int
) -> torch.Tensor:
    """Return prompts [B, P] and their answers [B, P + n]; the shorter ones are padded on the right."""
    longest = max(map(len, answers))
    rows = [[*answer, *[padding] * (longest - len(answer))] for answer in answers]
    return torch.cat((input_ids, torch.tensor(rows, device=input_ids.device)), dim=1)
