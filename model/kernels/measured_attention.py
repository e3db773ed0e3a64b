"""The attention of passes over a few rows on a GPU: transformers' own, or a faster one, by measurement.

Where a model's query heads share heads of keys, and there is a mask, transformers on CUDA first copies
keys and values for every query head, in every layer. Here the queries of all heads that share keys
are the rows of one matrix instead. There are two ways to attend then:

- `folded_sdpa`: torch's attention. Four launches and no copy of the cache; transformers' way has three,
  two of which copy the cache.
- `folded_products`: two batched products around a softmax. Seven launches in half precision, five
  without groups. Torch's kernel with a mask gives one block all keys of some queries, so after a long
  text few blocks work; products share the keys among blocks.

Both keep scores in float32. If scores were rounded to the model's dtype, as in transformers' eager
attention, the products would be five times as far off as torch's attention (81 queries, 593 keys,
bfloat16: 8.7e-3 from float64 instead of 2.3e-3, and 1.7e-3 with torch's), and drafted texts would
differ from plain decoding more often.

Which is fastest depends on the device and on the numbers of queries and keys. Candidates take the same inputs, as
of a draft after a text. One that fails, or whose numbers are not those of the first, is left out with a warning.
Several calls in a row are timed: launched by the host, or replayed as a CUDA graph, as the model's passes are. A
choice is made once a process, at a target's first pass. Before a pass only its number of rows is known, so one
function is registered for each number of rows; it holds the choice for every number of keys.

Shapes: n queries in each of H heads, T keys and values in each of K heads, G = H / K heads of queries
that share keys; D and E numbers in a key and a value. B texts, one but for batches.
"""

from __future__ import annotations

import logging
import statistics
import textwrap
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..machine.hardware import captured_graph
from ..machine.timing import seconds_of
from .registered_attention import USUAL, is_special, register_attention, usual_attention

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
    return captured_graph(call, device).graph.replay


# Torch's kernel copies a mask whose rows do not begin at multiples of this many numbers.
MASK_ALIGNMENT = 16


def can_fold(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> bool:
    """Whether the shapes and dtypes are those of `folded_sdpa` and, for one text, `folded_products`."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    return (
        len(query) == len(key)
        and mask.shape == (len(query), 1, num_queries, num_keys)
        and mask.dtype in (torch.bool, query.dtype)
        and query.dtype == key.dtype == value.dtype
        and query.shape[1] % key.shape[1] == 0
    )


def folded_sdpa(
    query: torch.Tensor,  # [B, H, n, D]
    key: torch.Tensor,  # [B, K, T, D]
    value: torch.Tensor,  # [B, K, T, E]
    mask: torch.Tensor,  # boolean (True: seen) or additive, [B, 1, n, T]
    scale: float,
) -> torch.Tensor:
    """Return values [B, n, H, E] attended by torch's kernel over folded heads."""
    num_sequences, num_heads, num_queries, _ = query.shape
    num_keys, num_groups = key.shape[2], num_heads // key.shape[1]
    width = -(-num_keys // MASK_ALIGNMENT) * MASK_ALIGNMENT
    rows = mask.new_empty(num_sequences, num_groups, num_queries, width)[..., :num_keys]
    folded_mask = rows.copy_(mask).view(num_sequences, 1, -1, num_keys)  # [B, 1, G n, T]
    folded = query.reshape(num_sequences, key.shape[1], num_groups * num_queries, -1)
    attended = scaled_dot_product_attention(folded, key, value, folded_mask, scale=scale)
    heads = attended.reshape(num_sequences, num_heads, num_queries, -1)
    return heads.transpose(1, 2).contiguous()


def folded_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend by two batched products over folded heads, of one text; arguments and result as of `folded_sdpa`."""
    num_heads, num_queries, num_keys = *query.shape[1:3], key.shape[2]
    folded = query[0].reshape(key.shape[1], -1, query.shape[-1])  # [K, G n, D]
    scores = _products(folded, key[0].transpose(1, 2))  # [K, G n, T]
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.finfo(query.dtype).min)
    by_head = scores.view(num_heads, num_queries, num_keys)
    torch.add(mask[0], by_head, alpha=scale, out=by_head)
    weights = scores.softmax(dim=-1).to(query.dtype)
    if len(weights) < num_heads:
        rows = torch.bmm(weights, value[0])  # [K, G n, E]
        heads = rows.reshape(num_heads, num_queries, rows.shape[-1])
        return heads.transpose(0, 1).contiguous()[None]
    attended = query.new_empty(1, num_queries, num_heads, value.shape[-1])
    torch.bmm(weights, value[0], out=attended[0].transpose(0, 1))
    return attended


def _products(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return batched products, in float32 for factors in half precision."""
    if rows.dtype.itemsize >= 4:
        return torch.bmm(rows, columns)
    if rows.is_cuda:
        # The CPU has no such product.
        return torch.bmm(rows, columns, out_dtype=torch.float32)
    return torch.bmm(rows.float(), columns.float())


# Beside the usual one; names differ in their first letters.
FOLDED: dict[str, Attend] = {"folded": folded_sdpa, "products": folded_products}


def measured_attention(
    names: tuple[str, ...],
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by the function, of these names for each of `KEYS`, that was measured fastest for this number of keys.

    It was measured for one text. With several, each of which gives torch's kernel blocks of its own, heads are
    folded if they share keys. Unsupported cases go to transformers' function: passes without a mask, masks that
    differ by head, dropout, gradients, special arguments.
    """
    function = FOLDED.get(names[bucket(key.shape[2], KEYS)])
    if function is not None and len(query) > 1:
        function = folded_sdpa if key.shape[1] < query.shape[1] else None
    is_refused = dropout or is_special(kwargs) or torch.is_grad_enabled()
    if (
        function is None
        or is_refused
        or attention_mask is None
        or not can_fold(query, key, value, attention_mask)
    ):
        return usual_attention(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return function(query, key, value, attention_mask, scale), None


def first_letters(names: Sequence[str]) -> str:
    return "".join(name[0] for name in names)


def registered(names: tuple[str, ...]) -> str:
    """Return the name of `measured_attention` with these names; "" if all are the usual one."""
    if set(names) == {USUAL}:
        return ""
    return register_attention(
        f"measured_{first_letters(names)}", partial(measured_attention, names)
    )


@cache
def choice_on_gpu(
    heads: LayerHeads, dtype: torch.dtype, device: torch.device, is_replayed: bool
) -> Choice:
    """Return the fastest attention on a GPU: measured once a process; () if nothing can be folded."""
    if not heads.num_heads or heads.num_heads % heads.num_key_heads:
        return ()
    num_groups = heads.num_heads // heads.num_key_heads
    layer = SimpleNamespace(num_key_value_groups=num_groups, is_causal=True)

    def usual(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        return usual_attention(layer, query, key, value, mask, scaling=scale)[0]

    # Without groups nothing is folded, and torch's attention is the usual one.
    others = {name: FOLDED[name] for name in FOLDED if num_groups > 1 or name != "folded"}
    synchronize = partial(torch.cuda.synchronize, device)
    candidates = {USUAL: usual, **others}
    return measured_choice(candidates, heads, dtype, device, synchronize, is_replayed)
