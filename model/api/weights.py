"""How a model's weights are kept: in the bits of its file, or as plain numbers.

Weights that stay in their bits are read by the kernel for a few rows (`kernels/packed.py`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..kernels.packed import TYPES
from ..kernels.short_pass import DTYPES, short_pass_kernel
from ..options import WEIGHTS, unknown_name
from .gguf import check_gguf, is_gguf, read


def choose_weights(
    path: str | Path, asked: str, device: torch.device | str, dtype: torch.dtype | str
) -> str | None:
    """Return how a model's weights are kept: "native" or "dequantised", None if it is not a GGUF file.

    Args:
        path: as `read`.
        asked: one of `WEIGHTS`; "auto" is native where it can be.
        device: where they are to lie.
        dtype: of the numbers that are not packed, and of what is computed.

    Raises:
        ValueError: for another word, and where they cannot be kept as it was asked for.
    """
    if asked not in WEIGHTS:
        raise ValueError(unknown_name("weights", asked, WEIGHTS))
    if not is_gguf(path):
        if asked != "auto":
            raise ValueError(
                f"weights: got {asked} with {path}; allowed: only with a GGUF file; leave it out"
            )
        return None
    if asked == "dequantised":
        return asked
    check_gguf(path)
    reason = _why_not_native(Path(path), torch.device(device), dtype)
    if asked == "native" and reason:
        raise ValueError(f"weights: got native {reason}; or give dequantised")
    return "dequantised" if reason else "native"


def _why_not_native(file: Path, device: torch.device, dtype: torch.dtype | str) -> str:
    """Return why a file's weights cannot stay as they are, and what would be allowed; "" if they can."""
    from .packed_gguf import has_packed  # not in an older transformers

    if device.type != "cpu":
        return f"on {device}; allowed: on a CPU"
    if dtype != "auto" and dtype not in (*DTYPES, *(str(one).split(".")[1] for one in DTYPES)):
        return f"in {dtype}; allowed: in float32, bfloat16 or float16"
    if not has_packed(file):
        return (
            f"with {file}, which has no such weights; allowed: with weights of {', '.join(TYPES)}"
        )
    if not short_pass_kernel():
        return "without its kernel (a warning says why); allowed: where the kernel can be built"
    return ""


def read_weights(path: str | Path, is_native: bool = False, **words: Any) -> PreTrainedModel:
    """Return the causal LM of a GGUF file, a folder or a hub name; arguments as `read`.

    Args:
        path: as `read`.
        is_native: whether the weights of a GGUF file are kept as they are (`choose_weights`).
        words: as `read`.

    Raises:
        ValueError: as `read`; if the file lacks weights of the model.
    """
    if not is_gguf(path):
        return read(AutoModelForCausalLM, path, **words)
    check_gguf(path)
    words["quantization_config"] = transformers.GgufConfig(dequantize=not is_native)
    with _packed_layers() if is_native else nullcontext():
        model, found = read(AutoModelForCausalLM, path, output_loading_info=True, **words)
    if is_native:
        model.hf_quantizer.remove_quantization_config(model)
    if missing := sorted(found["missing_keys"]):
        # Transformers fills them with random numbers.
        raise ValueError(f"{path} lacks {len(missing)} weights, the first is {missing[0]}")
    return model


def _packed_layers() -> AbstractContextManager[None]:
    from .packed_gguf import packed_layers  # not in an older transformers

    return packed_layers()
