"""Models that torchao quantised to whole numbers: our kernel reads these, or they are dequantised.

torchao keeps int8 weights, and on a CPU int4 weights too, as whole numbers of eight bits with a scale for each
group of inputs (torchao 0.18: `Int8Tensor`, `IntxUnpackedToInt8Tensor`). Its own product unpacks the whole
matrix at each call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...kernels.packed import INT8, PackedLinear

# torchao's configs whose weights the kernel reads.
CONFIGS = ("Int8WeightOnlyConfig", "IntxWeightOnlyConfig")


def quantised_as(config: Any) -> str | None:
    """Return the name of the torchao config that a model was quantised with; None if torchao did not quantise it.

    Args:
        config: of the model, of transformers or as a dictionary.
    """
    words = config if isinstance(config, dict) else config.to_dict()
    found = words.get("quantization_config") or {}
    if found.get("quant_method") != "torchao":
        return None
    kind = found.get("quant_type") or {}
    of_all = kind.get("default") if isinstance(kind, dict) else None
    return str(of_all["_type"]) if isinstance(of_all, dict) else "another kind of torchao config"


def pack(model: Any) -> None:
    """Replace the layers that torchao quantised by packed ones, if these have the same weights to the bit.

    Other layers stay as they are: those with zero points or groups that blocks of 32 inputs cannot hold, or whose
    inputs are quantised too.
    """
    for name, layer in list(_quantised(model)):
        blocks = _blocks(layer.weight)
        if blocks is None:
            continue
        packed = PackedLinear(blocks, layer.weight.dtype, layer.bias)
        if torch.equal(packed.weight, layer.weight.dequantize()):
            model.set_submodule(name, packed)
    _forget(model)


def dequantise(model: Any) -> None:
    """Replace the weights that torchao quantised by plain ones."""
    for _, layer in list(_quantised(model)):
        layer.weight = nn.Parameter(layer.weight.dequantize(), requires_grad=False)
    _forget(model)


def _quantised(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and hasattr(module.weight, "qdata"):
            yield name, module


def _forget(model: Any) -> None:
    if not any(_quantised(model)):
        model.hf_quantizer.remove_quantization_config(model)


def _blocks(weight: Any) -> torch.Tensor | None:
    """Return a weight's blocks [O, I / 32, 36], uint8; None if they cannot hold it."""
    numbers, scale, zeros = weight.qdata, weight.scale, weight.zero_point
    quantises_inputs = getattr(weight, "act_quant_kwargs", None) or getattr(
        weight, "activation_quantization", None
    )
    is_plain = (
        not quantises_inputs
        and numbers.dtype == torch.int8
        and numbers.ndim == 2
        and scale.shape[:1] == numbers.shape[:1]
        and (zeros is None or not zeros.any())
    )
    size = INT8[0]
    if not is_plain or numbers.shape[1] % (size * scale.shape[1]):
        return None
    count = numbers.shape[1] // size
    scales = scale.float().repeat_interleave(count // scale.shape[1], dim=1)[:, :, None]
    return torch.cat(
        (
            scales.contiguous().view(torch.uint8),
            numbers.view(torch.uint8).reshape(len(numbers), count, size),
        ),
        dim=2,
    )
