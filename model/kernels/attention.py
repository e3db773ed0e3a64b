"""The attention of a pass, by the fastest function for its number of queries.

On a CPU torch's kernel takes 1.3 to 7 times as long as our own (`short_pass`) for the few queries
of a draft, and 1.1 to 2.5 times as long for a prompt. The number of queries up to which ours is
faster depends on heads, dtype and machine, so it is measured once and kept on disk. Ours sums in
another order: in float32 near-ties are decided with transformers' own attention (`reference`), as
with `model.kernels.linear`.

Longer passes use torch's kernel. When there is a mask, transformers' sdpa attention first repeats
keys and values for every query head of a group: a copy of the whole cache, times the group size, in
every layer. Torch's CPU kernel reads grouped heads as they are, with the same bits. On a GPU,
grouped heads with a mask would fall back to matrix products, so transformers' own way stays there.

Shapes: n queries in each of H heads, T keys and values in each of K heads, D and E numbers in a key and a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..machine.measurements import read_measured, write_measured
from ..machine.timing import interleaved_medians
from . import short_pass as few_rows
from .choice import FEWEST_WEIGHTS, random_numbers
from .linear import is_exact
from .short_pass import DTYPES, short_pass_kernel

GROUPED, FEW_QUERIES = "sdpa_grouped", "few_queries"
# Arguments of transformers' attention functions that the kernels do not support.
SPECIAL = ("position_bias", "softcap", "cache", "head_mask", "output_attentions")
# Measured numbers of queries: of drafts after a text of NUM_KEYS tokens, and of prompts.
DRAFTS, NUM_KEYS = (1, 8, 32, 128), 512
PROMPTS = (512, 2048)
# Timing reads this many bytes of keys and values in turn, since in a pass each layer's come from memory.
TIMED_BYTES = 2**24
NUM_TIMES = 15
ENOUGH_SECONDS = 0.05  # of timing for one function and number of queries; at least two rounds


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend like transformers' sdpa attention, bit for bit, without repeating heads.

    Args:
        module: the attention layer.
        query: [1, H, n, D].
        key: [1, K, T, D].
        value: [1, K, T, E].
        attention_mask: boolean or additive, [1, 1, n, T]; without one, transformers copies nothing.
        dropout: as in sdpa.
        scaling: as in sdpa.
        **kwargs: other arguments of the model; unsupported ones lead to transformers' function.

    Returns:
        The attended values [1, n, H, E], and None for the weights.
    """
    is_grouped = key.shape[1] < query.shape[1]
    # Transformers 5 itself groups the heads of a single query, unless it is compiled.
    is_left_alone = query.shape[2] == 1 and not torch.compiler.is_compiling()
    if attention_mask is None or is_left_alone or not is_grouped or _is_special(kwargs):
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
        return result
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, scale=scaling, enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous(), None


def few_queries_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by the kernel for a few queries; equal to `grouped_attention` up to rounding.

    Unsupported cases go to `grouped_attention`: queries that see later ones, masks that differ by
    head or cover more than a draft, dropout, special arguments.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    shape = (1, 1, num_queries, num_keys)
    is_causal = attention_mask is None and num_queries > 1
    if attention_mask is not None:
        is_known = num_queries <= DRAFTS[-1] and attention_mask.shape == shape
    else:
        is_known = not is_causal or (num_queries == num_keys and _is_decoder(module, kwargs))
    if not is_known or dropout or key.dtype != query.dtype or _is_special(kwargs):
        return grouped_attention(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return few_rows.attend(query, key, value, attention_mask, scale, is_causal), None


def _is_decoder(module: torch.nn.Module, options: dict[str, Any]) -> bool:
    """Whether attention without a mask is causal, as transformers' sdpa attention decides it."""
    is_causal = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _is_special(options: dict[str, Any]) -> bool:
    return any(all(options.get(name) is not off for off in (None, False)) for name in SPECIAL)


AttentionInterface.register(GROUPED, grouped_attention)
AttentionInterface.register(FEW_QUERIES, few_queries_attention)
for name in (GROUPED, FEW_QUERIES):
    # Register the mask function too, or passes without our mask would lose their windows.
    AttentionMaskInterface.register(name, sdpa_mask)


class Attention:
    """The attention functions of a model's passes.

    Args:
        config: the model's text config.
        groups_heads: whether passes of several rows use `grouped_attention`.
        most_queries: largest number of rows for which passes use `few_queries_attention`; 0: none.
        is_reference: whether every function counts as reference: in compiled passes, which round in
            their own way, and in half precision, where near-ties may fall either way.

    Attributes:
        name: name of the functions in use.
    """

    def __init__(
        self, config: Any, groups_heads: bool, most_queries: int, is_reference: bool = False
    ) -> None:
        self._config = config
        self._groups_heads = groups_heads
        self._most_queries = most_queries
        self._is_always_reference = is_reference
        self._is_off = False
        self.name = f"attention-{most_queries}"

    def for_rows(self, num_rows: int) -> AbstractContextManager[None]:
        """Return the block to run a pass over `num_rows` rows in."""
        if num_rows <= self._most_queries and not self._is_off:
            return exchanged(self._config, FEW_QUERIES)
        # For a single query without a mask no heads are repeated, unless compiled.
        return exchanged(self._config, GROUPED) if self._groups_heads else nullcontext()

    def is_reference(self, num_rows: int) -> bool:
        """Whether a pass over this many rows attends as plain decoding does, bit for bit."""
        return self._is_always_reference or num_rows > self._most_queries

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within the block passes attend as plain decoding does, bit for bit."""
        self._is_off = not self._is_always_reference
        try:
            yield
        finally:
            self._is_off = False


@contextmanager
def exchanged(config: Any, name: str) -> Iterator[None]:
    """Within the block the model of this config attends with a registered function."""
    stock = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = stock


def can_exchange(model: PreTrainedModel) -> bool:
    """Whether the model accepts registered attention functions, uses sdpa, and runs on the CPU."""
    config = model.config.get_text_config(decoder=True)
    return (
        getattr(model, "_supports_attention_backend", False)
        and getattr(config, "_attn_implementation", None) == "sdpa"
        and model.device.type == "cpu"
    )


class HeadShape(NamedTuple):
    """The heads of a layer's keys or values: how many, and their size."""

    num_heads: int
    head_dim: int


def attention(
    model: PreTrainedModel, shapes: tuple[HeadShape, HeadShape], machine: str, is_compiled: bool
) -> Attention:
    """Return the fastest attention for a model's passes on this machine: measured once, then read from disk.

    Args:
        model: the model.
        shapes: heads of keys and of values.
        machine: key of model and machine (`machine_key`).
        is_compiled: whether passes are compiled.
    """
    config = model.config.get_text_config(decoder=True)
    if not can_exchange(model):
        return Attention(config, groups_heads=False, most_queries=0)
    num_heads = getattr(config, "num_attention_heads", 0)
    num_key_value_heads = getattr(config, "num_key_value_heads", None) or num_heads
    is_reference = is_compiled or not is_exact(model.dtype)
    most_queries = _most_queries(model, num_heads, shapes, machine)
    return Attention(config, num_heads != num_key_value_heads, most_queries, is_reference)


def _most_queries(
    model: PreTrainedModel, num_heads: int, shapes: tuple[HeadShape, HeadShape], machine: str
) -> int:
    """Return the largest number of queries for which the kernel is faster; 0: never."""
    is_small = sum(parameter.numel() for parameter in model.parameters()) < FEWEST_WEIGHTS
    if is_small or hasattr(model, "_orig_mod") or model.dtype not in DTYPES:
        return 0
    if num_heads % shapes[0].num_heads or not (build := short_pass_kernel()):
        return 0
    name, key = "attention", f"{machine}-{build}"
    try:
        return int(read_measured(name, key)["most_queries"])
    except (TypeError, ValueError, KeyError):  # no file, or not a valid one
        most = measure(num_heads, shapes, model.dtype)
    write_measured(name, key, {"most_queries": most})
    return most


@torch.inference_mode()
def measure(num_heads: int, shapes: tuple[HeadShape, HeadShape], dtype: torch.dtype) -> int:
    """Time both kinds of attention for drafts and prompts: takes one second for 16 heads of 64.

    Args:
        num_heads: H.
        shapes: heads of a layer's keys and values.
        dtype: of both.

    Returns:
        The largest number of queries up to which the kernel is always faster.
    """
    module = torch.nn.Module()
    module.num_key_value_groups = num_heads // shapes[0].num_heads  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(0)  # not the user's
    most = 0
    for n in (*DRAFTS, *PROMPTS):
        is_draft = n in DRAFTS
        num_keys = NUM_KEYS if is_draft else n
        sizes = [(1, part.num_heads, num_keys, part.head_dim) for part in shapes]
        num_bytes = sum(torch.Size(size).numel() for size in sizes) * dtype.itemsize
        layers = [
            [random_numbers(size, generator, dtype) for size in sizes]
            for _ in range(max(1, TIMED_BYTES // num_bytes))
        ]
        query = random_numbers((1, num_heads, n, shapes[0].head_dim), generator, dtype)
        mask = query.new_zeros(1, 1, n, num_keys) if is_draft and n > 1 else None
        calls = [
            partial(_attend, function, module, query, layers, mask)
            for function in (few_queries_attention, grouped_attention)
        ]
        ours, theirs = interleaved_medians(calls, NUM_TIMES, ENOUGH_SECONDS, least_rounds=2)
        if ours > theirs:
            break
        most = n
    return most


def _attend(
    function: Callable[..., Any],
    module: torch.nn.Module,
    query: torch.Tensor,
    layers: Sequence[Sequence[torch.Tensor]],
    mask: torch.Tensor | None,
) -> None:
    """Run an attention function over the keys and values of several layers."""
    for key, value in layers:
        function(module, query, key, value, mask)
