"""Attention functions that passes use in place of a model's own, and the names under which its config knows them.

A model's config names its attention for all threads, so a function attends in passes of ours alone: other
threads that run the model meanwhile attend as usual. Several sequences in one pass are attended sequence by
sequence, with the function that a pass of one sequence uses.

On GPUs of compute capability 9 and 10 PyTorch 2.13 prefers cuDNN to its flash and memory-efficient kernels. cuDNN
builds a plan, tens of milliseconds of work, for every number of keys it has not seen; a sequence that is decoded
has another one at every step. The switches are the process's: a command turns cuDNN off for good, so that
transformers' `generate` beside us runs without it too; the library, a guest in the user's process, does so for its
passes alone.

Shapes: B sequences, S queries of all sequences in each of H heads, T keys of the longest sequence in each of K
heads; D and E numbers in a key and a value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..machine.own_forwards import is_in_pass

# Transformers' name of its attention by torch's function.
USUAL = "sdpa"
# Arguments of transformers' attention functions that other functions do not support.
SPECIAL = ("position_bias", "softcap", "cache", "head_mask", "output_attentions")


def register_attention(name: str, function: Callable[..., Any], is_eager: bool = False) -> str:
    """Register an attention function for passes with transformers; return its name.

    Other threads that run the model meanwhile attend by transformers' sdpa, or as the model is eager.
    """

    def attention(module: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        if is_in_pass():
            return function(module, *arguments, **options)
        attend = _eager(module) if is_eager else sdpa_attention_forward
        return attend(module, *arguments, **options)

    AttentionInterface.register(name, attention)
    # The mask function too, or passes without our mask would lose their windows.
    AttentionMaskInterface.register(name, eager_mask if is_eager else sdpa_mask)
    return name


def is_special(options: dict[str, Any]) -> bool:
    """Whether the arguments need a feature that only transformers' own attention functions have."""
    return any(all(options.get(name) is not off for off in (None, False)) for name in SPECIAL)


def usual_attention(*arguments: Any, **options: Any) -> tuple[torch.Tensor, None]:
    """Attend by transformers' sdpa attention; arguments and result as there."""
    result: tuple[torch.Tensor, None] = sdpa_attention_forward(*arguments, **options)
    return result


def turn_off_cudnn(device: torch.device) -> None:
    """Turn cuDNN's attention off in this process if models will run on a GPU."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def without_cudnn(device: torch.device) -> Iterator[None]:
    """Within the block cuDNN's attention is off if the device is a GPU.

    Another thread may use the switch meanwhile, for another model: whoever found it off does not
    touch it, so that it is on in the end if it was on before.
    """
    is_on = device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled()
    if not is_on:
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def sdpa_backends(device: torch.device) -> str | None:
    """Return the attention that PyTorch may choose from on a GPU, such as "flash+efficient+math";
    None on other devices, where nothing can be switched.
    """
    if device.type != "cuda":
        return None
    switches: dict[str, Callable[[], bool]] = {
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
        "flash": torch.backends.cuda.flash_sdp_enabled,
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
        "math": torch.backends.cuda.math_sdp_enabled,
    }
    return "+".join(name for name, is_on in switches.items() if is_on())


# Transformers' name of the attention that each model writes in plain torch, in its own module.
EAGER = "eager"
PREFIX = "packed_"


class SequenceRows(NamedTuple):
    """The rows of all sequences in a layer."""

    sizes: Sequence[int]  # queries of each sequence, S in all
    ends: Sequence[int]  # rows in use of each sequence, its new ones included
    keys: Sequence[torch.Tensor]  # buffers [1, K, M, D]
    values: Sequence[torch.Tensor]  # buffers [1, K, M, E]
    is_masked: bool  # whether the mask of a single query says anything


def with_sequences(keys: torch.Tensor, sequences: SequenceRows) -> torch.Tensor:
    """Return the new keys [1, K, S, D], tied to the rows of all sequences: models hand on this very tensor."""
    keys.of_sequences = sequences  # type: ignore[attr-defined]
    return keys


def packed_name(name: str) -> str:
    """Return the name of a registered function's counterpart that attends sequence by sequence; made at the first
    call.
    """
    packed = PREFIX + name
    if packed not in AttentionInterface():
        register_attention(packed, partial(one_by_one, name), name == EAGER)
    return packed


def one_by_one(
    name: str,
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, S, D]
    key: torch.Tensor,  # [1, K, S, D], from `with_sequences`
    value: torch.Tensor,  # unused, as the sequences have theirs
    # Additive, [1, 1, S, T]; a row begins with its sequence's own keys.
    attention_mask: torch.Tensor | None,
    *arguments: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend, each sequence by the registered function of this name.

    Returns:
        The attended values [1, S, H, E], and None for the weights.

    Raises:
        AttributeError: if the model has made other keys of those of the cache.
    """
    sequences: SequenceRows = key.of_sequences  # type: ignore[attr-defined]
    attend = ALL_ATTENTION_FUNCTIONS[name] if name != EAGER else _eager(module)
    outputs, begin = [], 0
    rows_of = zip(sequences.sizes, sequences.ends, sequences.keys, sequences.values, strict=True)
    for size, length, *buffers in rows_of:
        end = begin + size
        mask = None
        if attention_mask is not None and (size > 1 or sequences.is_masked):
            mask = attention_mask[:, :, begin:end, :length]
        rows = (buffer[:, :, :length] for buffer in buffers)
        found = attend(module, query[:, :, begin:end], *rows, mask, *arguments, **options)
        outputs.append(found[0])
        begin = end
    return torch.cat(outputs, dim=1), None


def _eager(module: torch.nn.Module) -> Any:
    return sys.modules[type(module).__module__].eager_attention_forward
