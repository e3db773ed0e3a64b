"""Loads a GGUF file with its weights as they are: transformers places their blocks, our layers compute with them.

Transformers 5.23 plans which weights stay quantised for its newest loader. For architectures of its older one,
which dequantises all, the plan is made here, from its table of names and its processors of tensors: a weight stays
quantised if they only reorder its rows, as Llama's queries and keys. When the blocks are loaded, our layers take
the place of those that held them, and the model is a stock model without a quantizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import nn
from transformers.integrations.gguf.dequant import GGML_NAME
from transformers.integrations.gguf.reader import GgufHeader
from transformers.integrations.gguf.utils import get_gguf_conversion_mapping, get_gguf_plan
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.quantizers.quantizer_gguf import GgufHfQuantizer

from ...kernels.linear import TYPES, QuantisedEmbedding, QuantisedLinear
from .gguf_config import FREQS, LONG, SHORT

SCALE = "scalar_embed_scale"  # what Gemma's embedding is multiplied by
READ = (FREQS, LONG, SHORT)  # tensors that are read into the config


class Quantizer(GgufHfQuantizer):  # type: ignore[misc]
    """Transformers' loader of GGUF files, whose layers compute with our kernel."""

    _file: str

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is needed: the kernel is ours."""

    def read_header(self, gguf_file: str) -> None:
        self._file = gguf_file
        super().read_header(gguf_file)

    def get_state_dict(self, checkpoint_file: str, model: nn.Module) -> Any:
        return super().get_state_dict(checkpoint_file, model) if self.supported else self._tensors

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        is_native = not self.quantization_config.dequantize
        if self.supported:
            self.mapping = get_gguf_conversion_mapping(self.header.architecture, model.config)
            self.quantized, plan, permuted = get_gguf_plan(self.header, self.mapping)
            # Experts have other names, and permuted columns would need their inputs permuted.
            kinds = {
                name: GGML_NAME[kind]
                for name, kind in plan.items()
                if is_native and name.endswith(".weight") and name not in permuted
            }
        else:
            with torch.device("cpu"):  # the model is made on none
                self._tensors, kinds = _read(self._file, model, is_native, self.dtype)
        self.packed_modules = _hold_blocks(model, kinds)  # the newest loader dequantises others

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        shared: dict[int, torch.Tensor] = {}  # tied layers stay tied
        for name, module in [*model.named_modules()]:
            if not isinstance(module, _Blocks):
                continue
            blocks = shared.setdefault(id(module.weight), module.weight.data.view(module.shape))
            layer: nn.Module = QuantisedEmbedding(blocks, self.dtype, module.scale)
            if module.is_linear:
                layer = QuantisedLinear(blocks, self.dtype, module.bias)
            model.set_submodule(name, layer)
        if self.supported:
            vars(model)["_weight_conversions"] = None  # as transformers' own
        return model


class _Blocks(nn.Module):
    """Holds a layer's blocks while they are loaded, in rows of bytes.

    Args:
        layer: a linear layer or an embedding.
        kind: the blocks' type.
    """

    def __init__(self, layer: Any, kind: str) -> None:
        super().__init__()
        numbers, size = TYPES[kind]
        rows, columns = layer.weight.shape
        self.shape = (rows, columns // numbers, size)
        self.weight = nn.Parameter(
            torch.empty(rows, columns // numbers * size, dtype=torch.uint8), requires_grad=False
        )
        self.is_linear, self.bias = isinstance(layer, nn.Linear), getattr(layer, "bias", None)
        self.scale: float | None = getattr(layer, SCALE, None)


def _is_known(layer: Any) -> bool:
    """Whether a layer's weight can stay quantised: Gemma's embedding has a scale, and so a class of its own."""
    is_scaled = isinstance(layer, nn.Embedding) and hasattr(layer, SCALE)
    return type(layer) in (nn.Linear, nn.Embedding) or is_scaled


def _hold_blocks(model: Any, kinds: dict[str, str]) -> dict[str, nn.Module]:
    """Replace the layers whose weights stay quantised, of these types by their names; return them by these."""
    if model.config.tie_word_embeddings:
        tied = model._tied_weights_keys or {}
        kinds |= {one: kinds[source] for one, source in tied.items() if source in kinds}
    held: dict[str, nn.Module] = {}
    for name, layer in [*model.named_modules()]:
        kind = kinds.get(of_layer := f"{name}.weight")
        if kind in TYPES and _is_known(layer):
            held[of_layer] = _Blocks(layer, kind)
            model.set_submodule(name, held[of_layer])
    return held


def _read(
    file: str, model: Any, is_native: bool, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return a file's tensors by their names in the model, and the types of those that stay quantised, if any may;
    as transformers' `load_gguf_checkpoint`, which dequantises all, and leaves out those that the model has not.
    """
    reader = gguf.GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)
    layers = {f"{name}.weight": module for name, module in model.named_modules()}
    tensors: dict[str, torch.Tensor] = {}
    kinds: dict[str, str] = {}
    words = {"tensor_key_mapping": names, "parsed_parameters": {"tensors": tensors}}
    for tensor in reader.tensors:
        name = names.get(tensor.name, "")
        is_layer = is_native and _is_known(layers.get(name))
        order = _row_order(processor, tensor, words) if is_layer else None
        if order is not None and tensor.tensor_type.name in TYPES:
            tensors[name] = torch.from_numpy(tensor.data[order])
            kinds[name] = tensor.tensor_type.name
            continue
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        found = processor.process(weights=numbers, name=tensor.name, **words)
        if found.name in names:
            tensors[names[found.name]] = torch.from_numpy(np.copy(found.weights)).to(dtype)
        elif found.name and tensor.name not in READ:
            raise ValueError(
                f"{file}: tensor {tensor.name} is none of the model's; allowed: a file without it"
            )
    return tensors, kinds


def _row_order(processor: TensorProcessor, tensor: Any, words: Any) -> np.ndarray | None:
    """Return the order in which a matrix's rows go into the model; None if its numbers change otherwise."""
    num_rows = len(tensor.data)
    probe = np.arange(2 * num_rows).reshape(num_rows, 2)  # each row has its number in it
    try:
        found = processor.process(weights=probe, name=tensor.name, **words)
    except (ValueError, IndexError):  # it needs all columns
        return None
    if found.name != tensor.name or found.weights.shape != probe.shape:
        return None
    order: np.ndarray = found.weights[:, 0] // 2
    return order if np.array_equal(found.weights, probe[order]) else None


def has_quantised(file: Path) -> bool:
    """Whether a GGUF file has weights of types that the kernel knows."""
    try:
        kinds = {
            GGML_NAME.get(kind) for kind in GgufHeader.from_file(str(file)).ggml_types.values()
        }
    except ValueError:  # types that only the older loader knows
        kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    return not kinds.isdisjoint(TYPES)
