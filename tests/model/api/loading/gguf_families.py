"""Tiny random models of nine families, and their GGUF files as llama.cpp's converter writes them.

Names of tensors are those of the package gguf. What the converter changes in values is done here: Llama's queries
and keys are interleaved, one is added to Gemma's norms. A model is written in a type of llama.cpp's, and gets the
numbers that the file then has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.model.api.loading.tiny_gguf import add_tokenizer, tokens

# The first context of what is scaled is shorter than the texts of the tests.
HIDDEN, HEADS, KV_HEADS, HEAD, MLP, CONTEXT, ORIGINAL = 64, 4, 2, 16, 96, 512, 64
WINDOW = 32
LONG_FACTORS = [1.0, 1.5, 2.0, 3.0, 6.0, 12.0]
SHORT_FACTORS = [1.0, 1.0, 1.1, 1.2, 1.3, 1.5]
ATTENTION_FACTOR = math.sqrt(1 + math.log(CONTEXT / ORIGINAL) / math.log(ORIGINAL))


@dataclass(frozen=True)
class Family:
    """A config of transformers, and what a file says of it beside its sizes."""

    architecture: str
    model_type: str
    config: Mapping[str, Any]
    keys: Mapping[str, Any]  # without the architecture
    tensors: Mapping[str, list[float]] = field(default_factory=dict)
    head: int = HEAD
    num_layers: int = 3


def llama3_factors(base: float, original: int) -> list[float]:
    """Return the numbers by which the converter divides frequencies: factor 8, 1 and 4 as Llama 3.1."""
    factors = []
    for index in range(0, HEAD, 2):
        length = 2 * math.pi * base ** (index / HEAD)
        smooth = (original / length - 1) / 3
        factors.append(
            8.0 if smooth < 0 else 1.0 if smooth > 1 else 1 / ((1 - smooth) / 8 + smooth)
        )
    return factors


def llama3(original: int, base: float = 10000.0) -> Family:
    """Return a Llama 3.1 that was trained on so many tokens first."""
    rope = {"rope_type": "llama3", "rope_theta": base, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": original}
    keys = {"rope.freq_base": base, "rope.dimension_count": HEAD, "vocab_size": len(tokens())}
    factors = {"rope_freqs.weight": llama3_factors(base, original)}
    return Family("llama", "llama", {"rope_parameters": rope}, keys, factors)


def scaled(kind: str, base: float, factor: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return rotary settings that are scaled, and the keys that say so."""
    rope = {"rope_type": kind, "rope_theta": base, "factor": factor}
    keys = {"rope.freq_base": base, "rope.scaling.type": kind, "rope.scaling.factor": factor}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = ORIGINAL
        keys["rope.scaling.original_context_length"] = ORIGINAL
    return rope, keys


YARN, YARN_KEYS = scaled("yarn", 1e6, 4.0)
LINEAR, LINEAR_KEYS = scaled("linear", 1e6, 2.0)
OF_HEADS = {"attention.key_length": 32, "attention.value_length": 32}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": WINDOW}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": SHORT_FACTORS,
    "long_factor": LONG_FACTORS,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": ORIGINAL,
}
FAMILIES = {
    "Llama 3.1": llama3(8192, 500000.0),
    "Qwen 2": Family("qwen2", "qwen2", {"rope_parameters": YARN}, YARN_KEYS),
    "Qwen 3": Family(
        "qwen3",
        "qwen3",
        {"rope_parameters": LINEAR, "head_dim": 32},
        {**LINEAR_KEYS, **OF_HEADS},
        head=32,
    ),
    "Qwen 3 MoE": Family(
        "qwen3moe",
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        {**OF_HEADS, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
        head=32,
    ),
    "Gemma 2": Family(
        "gemma2",
        "gemma2",
        {**GEMMA, "attn_logit_softcapping": 7.0, "final_logit_softcapping": 9.0},
        {
            **OF_HEADS,
            "attention.sliding_window": WINDOW,
            "attn_logit_softcapping": 7.0,
            "final_logit_softcapping": 9.0,
        },
        head=32,
    ),
    "Gemma 3": Family(
        "gemma3",
        "gemma3_text",
        {**GEMMA, "rope_parameters": {"full_attention": {**LINEAR, "factor": 8.0}}},
        {**OF_HEADS, **LINEAR_KEYS, "rope.scaling.factor": 8.0, "attention.sliding_window": WINDOW},
        head=32,
        num_layers=7,
    ),
    "Phi 3": Family(
        "phi3",
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL},
        {
            "rope.freq_base": 10000.0,
            "rope.dimension_count": 12,
            "rope.scaling.original_context_length": ORIGINAL,
            "rope.scaling.attn_factor": ATTENTION_FACTOR,
            "attention.sliding_window": 0,
        },
        {"rope_factors_long.weight": LONG_FACTORS, "rope_factors_short.weight": SHORT_FACTORS},
    ),
    "OLMo 2": Family(
        "olmo2",
        "olmo2",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope.freq_base": 500000.0},
    ),
    "LFM 2": Family(
        "lfm2",
        "lfm2",
        {
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        {
            "attention.head_count_kv": [0, KV_HEADS, 0],
            "rope.freq_base": 10000.0,
            "shortconv.l_cache": 3,
            "vocab_size": len(tokens()),
        },
    ),
}


def family_model(family: Family) -> Any:
    """Return a random model, the same each time, of which few tokens win."""
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": family.num_layers,
    }
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    others = {"max_position_embeddings": CONTEXT, "initializer_range": 0.2, "pad_token_id": None}
    config = CONFIG_MAPPING[family.model_type](
        vocab_size=len(tokens()),
        bos_token_id=1,
        eos_token_id=2,
        **sizes,
        **heads,
        **{**others, **family.config},
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.2)
        if family.architecture.startswith("gemma"):  # else a token is followed by itself
            model.get_input_embeddings().weight.mul_(0.2)
    return model


def write_family(
    file: Path,
    family: Family,
    model: Any,
    kind: str = "F32",
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, list[float]] | None = None,
) -> Path:
    """Write a model, its matrices in a type of llama.cpp's, and give it the numbers of the file.

    `keys` (whole names) and `tensors` are written too; a key of the family with None is left out.
    """
    sizes = {
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "block_count": family.num_layers,
    }
    heads = {"attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS}
    epsilon = model.config.norm_eps if family.architecture == "lfm2" else model.config.rms_norm_eps
    norm = {"attention.layer_norm_rms_epsilon": epsilon}
    of_family = {**sizes, **heads, **norm, "feed_forward_length": MLP, **family.keys}
    writer = _begun(file, family, of_family, keys or {})
    for name, numbers in {**family.tensors, **(tensors or {})}.items():
        writer.add_tensor(name, torch.tensor(numbers).numpy())
    _add_weights(writer, family, model, kind)
    return _ended(writer, file)


def write_keys(file: Path, family: Family, keys: Mapping[str, Any]) -> Path:
    """Write a file of keys (without the architecture) and a tokenizer, without weights."""
    return _ended(_begun(file, family, keys, {}), file)


def _begun(
    file: Path, family: Family, of_family: Mapping[str, Any], keys: Mapping[str, Any]
) -> Any:
    writer = GGUFWriter(str(file), family.architecture)
    words = {f"{family.architecture}.{name}": value for name, value in of_family.items()} | dict(
        keys
    )
    if words.get("tokenizer.ggml.model") != "llama":
        add_tokenizer(writer)
    for name, value in words.items():
        writer.kv_data[0].pop(name, None)
        if value is not None:
            _adder(writer, value)(name, value)
    return writer


def _ended(writer: Any, file: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _adder(writer: Any, value: Any) -> Callable[[str, Any], None]:
    kinds = {
        bool: "add_bool",
        int: "add_uint32",
        float: "add_float32",
        str: "add_string",
        list: "add_array",
    }
    adder: Callable[[str, Any], None] = getattr(writer, kinds[type(value)])
    return adder


def _add_weights(writer: Any, family: Family, model: Any, kind: str) -> None:
    kinds = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(kinds[family.architecture], family.num_layers)
    is_tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if is_tied and name == "lm_head.weight":
            continue
        if "experts." in name:
            stem = f"blk.{name.split('.')[2]}.ffn_"
            parts = ["gate", "up"] if name.endswith("gate_up_proj") else ["down"]
            for part, numbers in zip(parts, tensor.chunk(len(parts), 1), strict=True):
                numbers.copy_(_written(writer, f"{stem}{part}_exps.weight", numbers, kind))
            continue
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2], 0)
        heads *= family.architecture == "llama"
        shift = float(family.architecture.startswith("gemma") and name.endswith("norm.weight"))
        numbers = tensor + shift
        if heads:
            halves = numbers.view(heads, 2, -1, *numbers.shape[1:])
            numbers = halves.transpose(1, 2).reshape(numbers.shape)
        stem, _, ending = name.rpartition(".")
        written = _written(writer, f"{names.get_name(stem)}.{ending}", numbers, kind)
        if heads:
            pairs = written.view(heads, -1, 2, *written.shape[1:])
            written = pairs.transpose(1, 2).reshape(written.shape)
        tensor.copy_(written - shift)


def _written(writer: Any, name: str, numbers: torch.Tensor, kind: str) -> torch.Tensor:
    """Add a tensor, a matrix in this type, and return the numbers that the file then has."""
    is_convolution = ".shortconv.conv." in name
    of_tensor = GGMLQuantizationType["F32" if is_convolution or numbers.ndim == 1 else kind]
    data = quantize((numbers[:, 0] if is_convolution else numbers).contiguous().numpy(), of_tensor)
    writer.add_tensor(name, data, raw_dtype=of_tensor)
    return torch.from_numpy(dequantize(data, of_tensor)).view(numbers.shape)
