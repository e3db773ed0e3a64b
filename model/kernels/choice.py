"""Measures which attention is fastest on a device, by the number of queries and of keys.

Candidates take the same inputs: heads as in a model's layers, keys and values as a cache's first rows,
an additive mask. One that fails, or whose numbers are not those of the first, is left out with a
warning. Several calls in a row are timed, with the device idle before and after: launched by
the host, so that launch time counts, or replayed as a CUDA graph, as the model's passes are. If two
are equally fast, the first is taken.

A choice is made once a process, at a target's first pass, which is part of the self-test.

Shapes: n queries in each of H heads, T keys and values in each of K heads; D and E numbers in a key and
a value.
"""

from __future__ import annotations

import logging
import statistics
import textwrap
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from ..machine.hardware import captured
from ..machine.timing import seconds_of

# Numbers of queries and keys that are measured. Other numbers use the choice for the next larger one.
# Passes over more queries are prompts; more keys use the choice for the largest number.
ROWS = (1, 8, 32, 64, 128)
KEYS = (512, 1024, 2048, 4096)
# Keys of a text are no round number, and kernels treat those otherwise; in graphs they are round.
NOT_ROUND = 5
ROUNDS, IN_A_ROW = 5, 10
# A candidate must be faster than the first by this factor to be chosen: less is noise.
FASTER = 1.05
# Largest difference from the first's numbers, relative, in steps of the dtype: scores are summed in
# another order, and weights may be rounded.
MOST_STEPS = 32
# Letters of torch's reason why a candidate fails.
LONGEST_REASON = 120

logger = logging.getLogger(__name__)

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
# For each of `ROWS`, the name of a candidate for each of `KEYS`.
Choice = tuple[tuple[str, ...], ...]


class LayerHeads(NamedTuple):
    """The heads of an attention layer."""

    num_heads: int
    num_key_heads: int
    key_size: int
    value_size: int


class Inputs(NamedTuple):
    """The inputs of a candidate."""

    query: torch.Tensor  # [1, H, n, D]
    key: torch.Tensor  # [1, K, T, D]
    value: torch.Tensor  # [1, K, T, E]
    mask: torch.Tensor  # [1, 1, n, T]
    scale: float


def bucket(number: int, sizes: tuple[int, ...]) -> int:
    """Return the index of the smallest size that is at least `number`; of the last size if there is none."""
    return min(bisect_left(sizes, number), len(sizes) - 1)


@torch.inference_mode()
def measured_choice(
    candidates: Mapping[str, Attend],
    heads: LayerHeads,
    dtype: torch.dtype,
    device: torch.device,
    synchronize: Callable[[], object],
    is_replayed: bool = False,
) -> Choice:
    """Return the fastest candidate for each number of queries and of keys; the first one is the usual one."""
    key = _waves((1, heads.num_key_heads, KEYS[-1], heads.key_size), dtype, device)
    value = _waves((1, heads.num_key_heads, KEYS[-1], heads.value_size), dtype, device)

    def inputs(num_rows: int, num_keys: int) -> Inputs:
        query = _waves((1, num_rows, heads.num_heads, heads.key_size), dtype, device)
        num_seen = num_keys - (0 if is_replayed else NOT_ROUND)
        # As of a draft: its rows begin at round places, and a node does not see the ones after it.
        mask = torch.zeros(1, 1, num_rows, num_keys, dtype=dtype, device=device)[..., :num_seen]
        mask[..., num_seen - num_rows :].fill_(torch.finfo(dtype).min).triu_(1)
        scale = heads.key_size**-0.5
        shown = key[:, :, :num_seen], value[:, :, :num_seen]
        return Inputs(query.transpose(1, 2), *shown, mask, scale)

    usable = _usable(candidates, inputs(ROWS[1], KEYS[0]))
    if len(usable) == 1:
        return ((*usable,) * len(KEYS),) * len(ROWS)

    def fastest(num_rows: int, num_keys: int) -> str:
        given = inputs(num_rows, num_keys)
        calls: dict[str, Callable[[], object]] = {
            name: partial(_in_a_row, attend, given) for name, attend in usable.items()
        }
        if is_replayed:
            calls = {name: _replay(call, device) for name, call in calls.items()}
        return _fastest(calls, synchronize)

    return tuple(tuple(fastest(num_rows, num_keys) for num_keys in KEYS) for num_rows in ROWS)


def _waves(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return numbers from -1 to 1, without using a random generator, whose state belongs to the user."""
    count = torch.Size(size).numel()
    return torch.arange(count, device=device).sin().view(size).to(dtype)


def _usable(candidates: Mapping[str, Attend], inputs: Inputs) -> dict[str, Attend]:
    """Return the candidates that work here, and say which do not."""
    (usual, first), *others = candidates.items()
    expected = first(*inputs).double()
    usable = {usual: first}
    most = MOST_STEPS * torch.finfo(inputs.query.dtype).eps
    for name, attend in others:
        try:
            found = attend(*inputs).double()
            error = float((found - expected).norm() / expected.norm())
        except (RuntimeError, TypeError) as problem:  # torch lacks an operation here
            first_line = (str(problem).splitlines() or [""])[0]
            reason = f"{type(problem).__name__}: {textwrap.shorten(first_line, LONGEST_REASON)}"
        else:
            if error <= most:
                usable[name] = attend
                continue
            reason = f"its numbers differ by {error:.1e} (allowed: {most:.1e})"
        logger.warning("attention %s is not used on %s: %s", name, inputs.query.device, reason)
    return usable


def _fastest(calls: Mapping[str, Callable[[], object]], synchronize: Callable[[], object]) -> str:
    """Return the name of the fastest call, or of the first if it is as fast."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(ROUNDS + 1):
        for name, call in calls.items():
            seconds = seconds_of(call, synchronize)
            if index:  # the first is a warm-up
                times[name].append(seconds)
    medians = {name: statistics.median(found) for name, found in times.items()}
    usual = next(iter(calls))
    fastest = min(medians, key=medians.__getitem__)
    return usual if medians[usual] <= FASTER * medians[fastest] else fastest


def _in_a_row(attend: Attend, inputs: Inputs) -> None:
    for _ in range(IN_A_ROW):
        attend(*inputs)


def _replay(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    call()  # what the first call sets up cannot be captured
    return captured(call, device).graph.replay
