"""The config that the keys and tensors of a GGUF file give a model: each that changes numbers is read or refused.

Transformers reads the keys of its tables, and drops all others without a word: rotary scaling, softcaps,
windows, the token that ends a turn. Here a key is read once it is asked for, and all others must be known to
change nothing. What llama.cpp computes without a key is set, too, where configs of transformers have other
defaults (its src/models and conversion, October 2026).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, NoReturn

import torch
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, read_gguf_metadata
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .gguf_tokenizer import check_tokenizer_keys

# Architectures that llama.cpp and transformers spell otherwise.
MODEL_TYPES = {"gemma3": "gemma3_text", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
MODEL_TYPES |= {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
# Tables of transformers, and of OLMo 2, for which it has none; that for Gemma 4 lacks half of what its files say.
TABLES = {**GGUF_CONFIG_MAPPING, "olmo2": GGUF_CONFIG_MAPPING["qwen2"]}
TABLES["gemma3_text"] = TABLES["gemma3"]
del TABLES["gemma4"]
FROM_TABLES = {name: name for name in TABLES} | MODEL_TYPES
ARCHITECTURES = sorted(
    {name for name, kind in FROM_TABLES.items() if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    - set(MODEL_TYPES.values())
    | GGUF_CONFIG_ARCHS.keys()
)
# Keys that tables lack, and what configs call them: the first name that a config has is set.
NUMBERS: dict[str, Sequence[str]] = {
    "attention.layer_norm_epsilon": [
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_epsilon",
        "norm_eps",
    ],
    "attn_logit_softcapping": ["attn_logit_softcapping"],
    "final_logit_softcapping": ["final_logit_softcapping"],
    "use_parallel_residual": ["use_parallel_residual"],
    "expert_feed_forward_length": ["moe_intermediate_size"],
    "expert_shared_feed_forward_length": ["shared_expert_intermediate_size"],
}
# Tensors whose presence says that layers have biases.
BIASES = {"attention_bias": "attn_q", "use_qkv_bias": "attn_q", "mlp_bias": "ffn_up"}
# Keys that say what shapes of tensors say, too (a wrong one is an error), or how a model was trained.
HARMLESS = {
    *("attention.head_count", "attention.head_count_kv", "block_count", "context_length"),
    *("embedding_length", "expert_count", "expert_feed_forward_length", "feed_forward_length"),
    *("rope.scaling.finetuned", "tensor_data_layout", "vocab_size"),
}
NEUTRAL = {"attention.causal": True, "ssm.dt_b_c_rms": False}
# Tensors that are read into the config.
FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
# Llama 3.1 to 3.3: what the numbers of FREQS follow from, beside the largest, the factor.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
BASE = 10000.0  # of rotary embeddings, without a key


class Keys(dict[str, Any]):
    """A file's keys, which notes those that were asked for; `take` adds the architecture to a name."""

    def __init__(self, file: str, metadata: Mapping[str, Any]) -> None:
        super().__init__(metadata)
        self.file, self.prefix = file, f"{metadata['general.architecture']}."
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)

    def take(self, name: str, default: Any = None) -> Any:
        return self.get(self.prefix + name, default)

    def refuse(self, name: str, allowed: str) -> NoReturn:
        got = self.take(name, "none")
        raise ValueError(f"{self.file}: {self.prefix}{name}: got {got}; allowed: {allowed}")


@lru_cache(maxsize=1)
def read_config(file: str, changed: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a file's keys and the config of its model; `changed` tells versions of the file apart.

    Raises:
        ValueError: for an architecture, key or tensor that cannot be read.
    """
    metadata, tensors = read_gguf_metadata(file)
    keys = Keys(file, metadata)
    architecture = metadata["general.architecture"]
    if architecture not in ARCHITECTURES:
        allowed = ", ".join(ARCHITECTURES)
        raise ValueError(f"{file}: got architecture {architecture}; allowed: {allowed}")
    check_tokenizer_keys(file, metadata)
    read = GGUF_CONFIG_ARCHS.get(architecture, _config)
    config: dict[str, Any] = read(keys, tensors)
    size = keys.take("attention.key_length")
    if keys.take("attention.value_length", size) != size:
        keys.refuse("attention.value_length", f"{size}, as attention.key_length")
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    found = list(dict.fromkeys(end for end in ends if end is not None))
    config["eos_token_id"] = found if len(found) > 1 else next(iter(found), None)
    for name in sorted(metadata.keys() - keys.asked):
        short = name.removeprefix(keys.prefix)
        if short != name and short not in HARMLESS and NEUTRAL.get(short) != metadata[name]:
            keys.refuse(short, "a file without this key, which is not read")
    return metadata, config


def _config(keys: Keys, tensors: Sequence[str]) -> dict[str, Any]:
    """Return the config of an architecture that transformers reads by a table of names."""
    kind = FROM_TABLES[keys["general.architecture"]]
    config = {"model_type": kind, "vocab_size": keys["tokenizer.ggml.tokens"]}
    config |= GGUF_CONFIG_DEFAULTS_MAPPING.get(kind, {})
    config["tie_word_embeddings"] = "output.weight" not in tensors or kind in ("falcon", "bloom")
    config |= {key: keys.get(f"tokenizer.{name}") for name, key in TABLES["tokenizer"].items()}
    for name, key in TABLES[kind].items():
        if key and keys.prefix + name in keys:
            config[key] = keys.take(name)
    usual = CONFIG_MAPPING[kind]()
    for name, candidates in NUMBERS.items():
        for key in [one for one in candidates if hasattr(usual, one)][:1]:
            if keys.prefix + name in keys:
                value = keys.take(name)
                config[key] = None if "softcap" in name and not value else value
    config |= {
        key: f"blk.0.{name}.bias" in tensors for key, name in BIASES.items() if hasattr(usual, key)
    }
    if config.get("num_attention_heads"):
        _set_attention(config, keys, usual)
        if getattr(usual, "rope_parameters", None):
            _set_rope(config, keys, usual, tensors)
    return config


def _set_attention(config: dict[str, Any], keys: Keys, usual: Any) -> None:
    """Set the size and scale of heads, and which layers have a window of how many tokens."""
    share = config["hidden_size"] // config["num_attention_heads"]
    size = int(keys.take("attention.key_length", share))
    config.pop("head_dim", None)  # some tables take it from the rotary dimensions
    if size != share or "head_dim" in vars(usual):
        config["head_dim"] = size
    num_layers, is_gemma2 = config["num_hidden_layers"], usual.model_type == "gemma2"
    if hasattr(usual, "query_pre_attn_scalar"):
        # With 27 billion weights Gemma scales queries otherwise; llama.cpp tells these models by their layers.
        is_27b = num_layers == (46 if is_gemma2 else 62)
        config["query_pre_attn_scalar"] = share if is_27b else size
    if not hasattr(usual, "sliding_window") or hasattr(usual, "use_sliding_window"):
        return  # no key names the layer at which Qwen's windows begin
    window = keys.take("attention.sliding_window", 4096 if is_gemma2 else 0)
    config["sliding_window"] = window or None
    pattern = keys.take("attention.sliding_window_pattern", 0) if window else 1
    if isinstance(pattern, int):
        pattern = [bool((layer + 1) % pattern) for layer in range(num_layers)] if pattern else []
    if pattern and hasattr(usual, "layer_types"):
        config["layer_types"] = [
            "sliding_attention" if is_local else "full_attention" for is_local in pattern
        ]


def _set_rope(config: dict[str, Any], keys: Keys, usual: Any, tensors: Sequence[str]) -> None:
    """Set the rotary embeddings: base, number of dimensions, and scaling by keys or by tensors."""
    rope = {"rope_type": "default", "rope_theta": keys.take("rope.freq_base", BASE)}
    config.pop("rope_theta", None)
    of_class = usual.rope_parameters
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotated = int(keys.take("rope.dimension_count", head))
    if "partial_rotary_factor" in of_class:
        rope["partial_rotary_factor"] = rotated / head
    elif rotated != head and "rotary_dim" not in config:
        keys.refuse("rope.dimension_count", f"{head}, the size of a head")
    kind, factor = keys.take("rope.scaling.type", "linear"), keys.take("rope.scaling.factor", 1.0)
    context = int(config["max_position_embeddings"])
    original = keys.take("rope.scaling.original_context_length", context)
    freqs, long, short = (_numbers(keys.file, name, tensors) for name in (FREQS, LONG, SHORT))
    if long and short:
        rope |= _longrope(short, long, original, keys.take("rope.scaling.attn_factor", 1.0))
        config["original_max_position_embeddings"] = original
    elif kind == "yarn" and not freqs:
        rope |= {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
        yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "attn_factor": None}
        for name, value in yarn.items():
            key = name.replace("attn", "attention")
            rope[key] = keys.take(f"rope.scaling.yarn_{name}", value)
    elif kind not in ("none", "linear") or long or short or (freqs and factor != 1):
        keys.refuse("rope.scaling.type", "none, linear, yarn, or longrope with its two tensors")
    elif kind == "linear" and factor not in (0, 1):
        rope |= {"rope_type": kind, "factor": factor}
    elif any(one != 1 for one in freqs):
        rope |= _llama3(rope, freqs) or _longrope(freqs, freqs, context, 1.0)
    config["rope_parameters"] = rope
    if "sliding_attention" in of_class:
        local = {"rope_type": "default", "rope_theta": keys.take("rope.freq_base_swa", BASE)}
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}


def _numbers(file: str, name: str, tensors: Sequence[str]) -> list[float]:
    """Return the numbers of a tensor; [] if the file has none of this name."""
    if name not in tensors:
        return []
    reader = import_module("gguf").GGUFReader(file)
    return next(one.data.tolist() for one in reader.tensors if one.name == name)


def _longrope(short: list[float], long: list[float], original: int, scale: float) -> dict[str, Any]:
    """Return rotary settings whose frequencies are divided by factors, by other ones beyond a length."""
    factors = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    return factors | {"original_max_position_embeddings": original, "attention_factor": scale}


def _llama3(rope: dict[str, Any], factors: list[float]) -> dict[str, Any]:
    """Return the settings of Llama 3.1 if the factors follow from them, else {}."""
    size = 2 * len(factors)
    settings = {"rope_type": "llama3", "factor": max(factors), **LLAMA3}
    sizes = {"head_dim": size, "max_position_embeddings": 2**17}
    model = CONFIG_MAPPING["llama"](rope_parameters={**rope, **settings}, **sizes)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model, torch.device("cpu"))
    plain = rope["rope_theta"] ** -(torch.arange(0, size, 2) / size)
    return settings if torch.allclose(plain / scaled, torch.tensor(factors)) else {}
