"""How a model's weights are kept: in the bits of its file, or as plain numbers.

Weights that stay in their bits are read by the kernel for a few rows (`kernels/packed.py`).
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...kernels.packed import TYPES
from ...kernels.short_pass import DTYPES, short_pass_kernel
from ...machine.hardware import begin_at_lines
from ...options import WEIGHTS, unknown_name
from . import packed_torchao
from .gguf import check_gguf, forget_parsed, is_gguf, read


def choose_weights(
    path: str | Path, asked: str, device: torch.device | str, dtype: torch.dtype | str, config: Any
) -> str | None:
    """Return how a model's weights are kept: "native" or "dequantised"; None: as transformers loads them.

    Args:
        path: as `read`.
        asked: one of `WEIGHTS`; "auto" is native where it can be, for a GGUF file else dequantised.
        device: where they are to lie.
        dtype: of the numbers that are not packed, and of what is computed.
        config: the model's, of transformers or as a dictionary; only that of a folder or a hub name is read.

    Raises:
        ValueError: for another word, and where they cannot be kept as it was asked for.
    """
    if asked not in WEIGHTS:
        raise ValueError(unknown_name("weights", asked, WEIGHTS))
    is_file = is_gguf(path)
    kind = None if is_file else packed_torchao.quantised_as(config)
    if not is_file and kind is None:
        if asked != "auto":
            allowed = "only with a GGUF file or a model that torchao quantised"
            raise ValueError(f"weights: got {asked} with {path}; allowed: {allowed}; leave it out")
        return None
    if asked == "dequantised":
        return asked
    if is_file:
        check_gguf(path)
    reason = _why_not_native(Path(path), kind, torch.device(device), dtype)
    if asked == "native" and reason:
        raise ValueError(f"weights: got native {reason}; or give dequantised")
    if reason:
        return "dequantised" if is_file else None
    return "native"


def _why_not_native(
    path: Path, kind: str | None, device: torch.device, dtype: torch.dtype | str
) -> str:
    """Return why weights cannot stay as they are, and what would be allowed; "" if they can."""
    if device.type != "cpu":
        return f"on {device}; allowed: on a CPU"
    if dtype != "auto" and dtype not in (*DTYPES, *(str(one).split(".")[1] for one in DTYPES)):
        return f"in {dtype}; allowed: in float32, bfloat16 or float16"
    if kind is None:
        from .packed_gguf import has_packed  # not in an older transformers

        if not has_packed(path):
            allowed = f"with weights of {', '.join(TYPES)}"
            return f"with {path}, which has no such weights; allowed: {allowed}"
    elif kind not in packed_torchao.CONFIGS:
        allowed = f"with one of {' or '.join(packed_torchao.CONFIGS)}"
        return f"with {path}, quantised with {kind}; allowed: {allowed}"
    if not short_pass_kernel():
        return "without its kernel (a warning says why); allowed: where the kernel can be built"
    return ""


def read_weights(path: str | Path, weights: str | None = None, **words: Any) -> PreTrainedModel:
    """Return the causal LM of a GGUF file, a folder or a hub name; its weights begin at cache lines.

    Args:
        path: as `read`.
        weights: as `choose_weights` returned; None: as transformers loads them, those of a GGUF file dequantised.
        words: as `read`.

    Raises:
        ValueError: as `read`; if the file lacks weights of the model.
    """
    if is_gguf(path):
        model = _read_gguf(path, weights == "native", **words)
        forget_parsed()
    else:
        model = keep_as(read(AutoModelForCausalLM, path, **words), weights)
    begin_at_lines(model)
    return model


def _read_gguf(path: str | Path, is_native: bool, **words: Any) -> PreTrainedModel:
    check_gguf(path)
    from .packed_gguf import packed_layers  # not in an older transformers

    words["quantization_config"] = transformers.GgufConfig(dequantize=not is_native)
    with packed_layers() if is_native else nullcontext():
        model, found = read(AutoModelForCausalLM, path, output_loading_info=True, **words)
    if is_native:
        model.hf_quantizer.remove_quantization_config(model)
    if missing := sorted(found["missing_keys"]):
        # Transformers fills them with random numbers.
        raise ValueError(f"{path} lacks {len(missing)} weights, the first is {missing[0]}")
    return model


def keep_as(model: PreTrainedModel, weights: str | None) -> PreTrainedModel:
    """Return a loaded model with the weights that torchao quantised, if any, kept as `choose_weights` returned."""
    if weights and packed_torchao.quantised_as(model.config):
        (packed_torchao.pack if weights == "native" else packed_torchao.dequantise)(model)
    return model
