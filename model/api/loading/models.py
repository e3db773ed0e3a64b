"""Load the model and the tokenizer of a decoder; anything else is refused in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from ...backends.passes.loaded_model import IN_TRAINING
from ...machine.packages import HERE
from ...options import DTYPES, unknown_name
from .weights import choose_weights, is_gguf, keep_as, read, read_tokenizer, read_weights

OF_TOKENIZER = ("revision", "token", "cache_dir", "local_files_only", "trust_remote_code")
# Arguments of transformers' `from_pretrained`, beside the settings of a checkpoint's config.
OF_WEIGHTS = frozenset(
    (
        *OF_TOKENIZER,
        *("adapter_kwargs", "attn_implementation", "code_revision", "config", "device_mesh"),
        *("distributed_config", "experts_implementation", "force_download", "generation_config"),
        *("ignore_mismatched_sizes", "kernel_config", "key_mapping", "low_cpu_mem_usage"),
        *("max_memory", "offload_buffers", "offload_folder", "offload_state_dict", "proxies"),
        *("quantization_config", "subfolder", "tp_plan", "tp_size", "use_kernels"),
        *("use_safetensors", "variant", "weights_only"),
    )
)
# Arguments that are given often, and what does it here.
INSTEAD = {
    "device": "device_map, such as device_map='cuda' (needs accelerate), or a loaded model: "
    "SpeculativeDecoder(model.to('cuda'), tokenizer)",
    "torch_dtype": "dtype",
    "load_in_8bit": "quantization_config=BitsAndBytesConfig(load_in_8bit=True)",
    "load_in_4bit": "quantization_config=BitsAndBytesConfig(load_in_4bit=True)",
    "model": "a loaded model goes to the class: SpeculativeDecoder(model, tokenizer)",
    "tokenizer": "one of your own goes to the class, with the model: SpeculativeDecoder(model, tokenizer)",
    "gguf_file": "the file's path as the model's",
}


def load(
    path: str | Path,
    dtype: str | torch.dtype,
    device_map: Any,
    words: Mapping[str, Any],
    of_method: Sequence[str],
    weights: str = "auto",
) -> tuple[PreTrainedModel, Any]:
    """Load a model in eval mode, and its tokenizer; arguments that nothing takes are refused before.

    The words are for transformers' `from_pretrained`; `of_method` names the method's options, from which one is
    suggested in an error; all else is as of `SpeculativeDecoder.from_pretrained`.
    """
    is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    if not is_float and dtype not in DTYPES:
        raise ValueError(unknown_name("dtype", dtype, [*DTYPES, "torch.float32 and the like"]))
    _refuse_unknown(path, words, of_method)
    device = "cpu" if device_map is None else "meta"
    is_file, is_auto = is_gguf(path), weights == "auto"
    config = {} if is_file or is_auto else _config_of(path, words)
    kept = choose_weights(path, weights, device, dtype, config)
    of_tokenizer = {name: words[name] for name in OF_TOKENIZER if name in words}
    tokenizer = read_tokenizer(path, **of_tokenizer)
    model = read_weights(path, kept, dtype=dtype, device_map=device_map, **words)
    if is_auto and not is_file:
        # The loaded model says who quantised it: nothing is read twice, and an adapter's folder has no config.
        keep_as(model, choose_weights(path, weights, device, dtype, model.config))
    return model.eval(), tokenizer


def _config_of(path: str | Path, words: Mapping[str, Any]) -> Any:
    """Return what is known of the model's config before it loads: all of it, or how it is to be quantised."""
    if words.get("quantization_config") is not None:
        quantisation = words["quantization_config"]
        is_plain = isinstance(quantisation, dict)
        return {"quantization_config": quantisation if is_plain else quantisation.to_dict()}
    if "config" in words:
        return words["config"]
    of_hub = {name: words[name] for name in (*OF_TOKENIZER, "subfolder") if name in words}
    config, _ = PretrainedConfig.get_config_dict(path, **of_hub)
    return config


def _refuse_unknown(path: str | Path, words: Mapping[str, Any], of_method: Sequence[str]) -> None:
    """Raise ValueError for a word that neither `from_pretrained` nor the checkpoint's config has."""
    for name in words:
        if name in INSTEAD:
            raise ValueError(
                f"{name}: not an argument of from_pretrained; allowed: {INSTEAD[name]}"
            )
    others = {name: value for name, value in words.items() if name not in OF_WEIGHTS}
    if others and "config" not in words:
        of_hub = {name: words[name] for name in OF_TOKENIZER if name in words}
        _, others = read(AutoConfig, path, return_unused_kwargs=True, **of_hub, **others)
    if unknown := [name for name in words if name in others and name not in OF_WEIGHTS]:
        known = [*of_method, "method", "dtype", "device_map", *sorted(OF_WEIGHTS)]
        raise ValueError(unknown_name("argument of from_pretrained", unknown[0], known))


def base_of(model: Any) -> PreTrainedModel:
    """Return a model to decode with; as `without_wrapper`, and refuses a model in training mode."""
    base = without_wrapper(model)
    if model.training:
        raise ValueError(IN_TRAINING)
    return base


def without_wrapper(model: Any) -> PreTrainedModel:
    """Return a model without peft's wrapper; ValueError for a learned prompt, and for anything but a causal LM."""
    is_model = isinstance(model, torch.nn.Module) and hasattr(model, "config")
    if is_model:
        base: PreTrainedModel = model
        if hasattr(model, "get_base_model"):
            if model.active_peft_config.is_prompt_learning:
                raise ValueError(
                    "model: got a learned prompt; allowed: adapters in the layers, such as LoRA"
                )
            base = model.get_base_model()
        return base
    kind = type(model).__name__
    what = f"got {model!r}" if isinstance(model, str | Path) else f"got a {kind}"
    if isinstance(model, str | Path):
        hint = "such as AutoModelForCausalLM.from_pretrained(path), or SpeculativeDecoder.from_pretrained(path)"
    elif hasattr(model, "get_vocab"):
        hint = "the tokenizer is the second argument"
    elif isinstance(model, torch.nn.Module) and hasattr(model, "module"):
        hint = "give what it wraps, its .module"  # of DataParallel and the like
    elif hasattr(model, "tokenizer"):  # a pipeline
        hint = "give its .model and its .tokenizer"
    elif hasattr(model, "model"):
        hint = "give what it wraps, its .model"
    else:
        hint = "such as AutoModelForCausalLM.from_pretrained(...)"
    raise ValueError(f"model: {what}; allowed: a loaded causal LM of transformers; {hint}")


def check_tokenizer(tokenizer: Any) -> None:
    """Raise ValueError if what is given as a tokenizer is not one."""
    if tokenizer is None or (callable(tokenizer) and hasattr(tokenizer, "get_vocab")):
        return
    what = repr(tokenizer) if isinstance(tokenizer, str) else f"a {type(tokenizer).__name__}"
    if hasattr(tokenizer, "generate"):
        hint = f"for a model: {HERE}.accelerate(model, tokenizer)"
    else:
        hint = "such as AutoTokenizer.from_pretrained(...); a method is named by method="
    raise ValueError(f"tokenizer: got {what}; allowed: the model's tokenizer, or None; {hint}")
