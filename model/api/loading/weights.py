"""Models as transformers reads them from a folder, a GGUF file or a hub name, and how their weights are kept.

Weights stay in the bits of their file, which the kernel for a few rows reads (`kernels/linear.py`), or are plain
numbers. torchao keeps int8 weights, and on a CPU int4 weights too, as whole numbers of eight bits with a scale for
each group of inputs (torchao 0.18: `Int8Tensor`, `IntxUnpackedToInt8Tensor`). Its own product dequantises the whole
matrix at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from ...kernels.linear import INT8, TYPES, QuantisedLinear, multiply_whole
from ...kernels.short_pass import DTYPES, short_pass_kernel
from ...machine.files import refuse_lfs_pointer, written_state
from ...machine.hardware import begin_at_lines
from ...machine.locks import SharedLock
from ...options import IN_WHOLE_NUMBERS, NATIVE, WEIGHTS, unknown_name

MAGIC = b"GGUF"
# Transformers dequantises by the first, and places the tensors by the second.
PACKAGES = ("gguf", "accelerate")
# 4.57 takes the first special token of a Llama file for the one that ends texts.
OLDEST_TRANSFORMERS = (5, 23)
# Held while names of transformers or gguf are patched for a load.
ONE_AT_A_TIME = SharedLock()
# torchao's configs whose weights the kernel reads.
CONFIGS = ("Int8WeightOnlyConfig", "IntxWeightOnlyConfig")


def is_gguf(path: str | Path) -> bool:
    """Whether a model is named as a GGUF file."""
    return str(path).lower().endswith(".gguf")


def check_gguf(path: str | Path) -> None:
    """Raise ValueError if a file is not a GGUF file, or the installed packages cannot read it."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"got {path}; allowed: an existing GGUF file, a folder or a hub name")
    refuse_lfs_pointer(file, f"model {path}")
    with file.open("rb") as content:
        found = content.read(len(MAGIC))
    if found != MAGIC:
        raise ValueError(f"{path} is not a GGUF file: it begins with {found!r}, not {MAGIC!r}")
    check_packages()


def check_packages() -> None:
    """Raise ValueError if a package that reads GGUF files is missing or too old."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ValueError(
            f"GGUF files need {' and '.join(missing)}; pip install {' '.join(missing)}"
        )
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TRANSFORMERS:
        oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
        raise ValueError(f"GGUF files need transformers {oldest} or newer; got {version}")


def read(auto_class: Any, path: str | Path, **words: Any) -> Any:
    """Load by an auto class of transformers, such as `AutoConfig`, from a GGUF file, a folder or a hub name."""
    if not is_gguf(path):
        return auto_class.from_pretrained(path, **words)
    check_gguf(path)
    file = Path(path).absolute()
    package, before = import_module("gguf"), transformers.logging.get_verbosity()
    # Not in an older transformers.
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS

    from .gguf_config import read_config
    from .gguf_tokenizer import complete_tokenizer

    parse = package.GGUFReader
    # Each file is parsed once, not for the config, the tokenizer and the weights each, and each table of names is
    # made once, not for each module: of a model with 30 layers and 49,152 tokens together 11 s.
    once = {
        "GGUFReader": lambda path: _parsed(parse, str(path), written_state(path)),
        "get_tensor_name_map": cache(package.get_tensor_name_map),
    }
    with patched(vars(package), once):
        transformers.logging.set_verbosity_error()  # of notes about keys of the file that are not needed
        try:
            metadata, config = read_config(str(file), written_state(file))
            own = {metadata["general.architecture"]: lambda *_: deepcopy(config)}
            with patched(GGUF_CONFIG_ARCHS, own):
                found = auto_class.from_pretrained(file.parent, gguf_file=file.name, **words)
        finally:
            transformers.logging.set_verbosity(before)
    if auto_class is AutoTokenizer:
        complete_tokenizer(found, metadata)
    return found


def read_tokenizer(path: str | Path, **words: Any) -> Any:
    """Return the tokenizer of a folder, a GGUF file or a hub name; errors as of `read`.

    Tokenizers that are a sentencepiece model, such as Llama's and Vicuna's, once put a word's beginning after every
    special token: "</s>" and "▁USER" where a chat goes on. Transformers 4 reads them so unless their settings say
    `legacy: false`. Transformers 5 takes no word for false, and reads second turns in tokens that these models were
    not trained on.
    """
    tokenizer = read(AutoTokenizer, path, **words)
    is_sentencepiece = str(getattr(tokenizer, "vocab_file", "")).endswith("tokenizer.model")
    if is_sentencepiece and getattr(tokenizer, "legacy", None) is False:
        settings = get_tokenizer_config(str(path), **words)
        if settings.get("legacy") is None:
            return read(AutoTokenizer, path, legacy=True, **words)
    return tokenizer


@lru_cache(maxsize=1)
def _parsed(parse: Callable[[str], Any], path: str, changed: object) -> Any:
    """Return the parsed file; `changed` tells its versions apart."""
    return parse(path)


@contextmanager
def patched(names: dict[str, Any], values: dict[str, Any]) -> Iterator[None]:
    """Within the block names of transformers or gguf have other values; one thread at a time."""
    with ONE_AT_A_TIME:
        own = {name: names[name] for name in values if name in names}
        names.update(values)
        try:
            yield
        finally:
            for name in values.keys() - own.keys():
                del names[name]
            names.update(own)


def choose_weights(
    path: str | Path, asked: str, device: torch.device | str, dtype: torch.dtype | str, config: Any
) -> str | None:
    """Return how a model's weights are kept: one of `WEIGHTS` but "auto"; None: as transformers loads them.

    "native-int8" is native, and multiplied in whole numbers, as llama.cpp does. "auto" is native where it can be,
    for a GGUF file else dequantised. The dtype is that of what is computed; a config may be a dictionary, and is
    read only for a folder or a hub name.

    Raises:
        ValueError: for another word than `WEIGHTS`, and where they cannot be kept as it was asked for.
    """
    if asked not in WEIGHTS:
        raise ValueError(unknown_name("weights", asked, WEIGHTS))
    is_file = is_gguf(path)
    kind = None if is_file else quantised_as(config)
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
    if asked in NATIVE and reason:
        raise ValueError(f"weights: got {asked} {reason}; or give dequantised")
    if reason:
        return "dequantised" if is_file else None
    return "native" if asked == "auto" else asked


def _why_not_native(
    path: Path, kind: str | None, device: torch.device, dtype: torch.dtype | str
) -> str:
    """Return why weights cannot stay as they are, and what would be allowed; "" if they can."""
    if device.type != "cpu":
        return f"on {device}; allowed: on a CPU"
    if dtype != "auto" and dtype not in (*DTYPES, *(str(one).split(".")[1] for one in DTYPES)):
        return f"in {dtype}; allowed: in float32, bfloat16 or float16"
    if kind is None:
        from .quantised_gguf import has_quantised  # not in an older transformers

        if not has_quantised(path):
            allowed = f"with weights of {', '.join(TYPES)}"
            return f"with {path}, which has no such weights; allowed: {allowed}"
    elif kind not in CONFIGS:
        allowed = f"with one of {' or '.join(CONFIGS)}"
        return f"with {path}, quantised with {kind}; allowed: {allowed}"
    if not short_pass_kernel():
        return "without its kernel (a warning says why); allowed: where the kernel can be built"
    return ""


def read_weights(path: str | Path, weights: str | None = None, **words: Any) -> PreTrainedModel:
    """Return the causal LM of a GGUF file, a folder or a hub name; its weights begin at cache lines.

    They are kept as `choose_weights` returned; None: as transformers loads them, those of a GGUF file dequantised.

    Raises:
        ValueError: if a GGUF file cannot be read, or lacks weights of the model.
    """
    if not is_gguf(path):
        model = keep_as(read(AutoModelForCausalLM, path, **words), weights)
        return _arranged(model, weights)
    check_gguf(path)
    from .quantised_gguf import Quantizer  # not in an older transformers

    words["quantization_config"] = transformers.GgufConfig(dequantize=weights not in NATIVE)
    with patched(AUTO_QUANTIZER_MAPPING, {"gguf": Quantizer}):
        model, found = read(AutoModelForCausalLM, path, output_loading_info=True, **words)
    if weights in NATIVE:
        model.hf_quantizer.remove_quantization_config(model)
    if left := sorted(found["unexpected_keys"]):
        raise ValueError(
            f"{path}: tensor {left[0]} is none of the model's; allowed: a file without it"
        )
    if missing := sorted(found["missing_keys"]):
        # Transformers fills them with random numbers.
        raise ValueError(f"{path} lacks {len(missing)} weights, the first is {missing[0]}")
    _parsed.cache_clear()
    return _arranged(model, weights)


def _arranged(model: PreTrainedModel, weights: str | None) -> PreTrainedModel:
    """Return the model with its weights where kernels read them fast, repacked if they ask for that."""
    begin_at_lines(model)
    if weights == IN_WHOLE_NUMBERS:
        multiply_whole(model)
    return model


def keep_as(model: PreTrainedModel, weights: str | None) -> PreTrainedModel:
    """Return a loaded model with the weights that torchao quantised, if any, kept as `choose_weights` returned.

    Native weights are in layers of ours, if these have the same weights to the bit. Other layers stay as they are:
    those with zero points or groups that blocks of 32 inputs cannot hold, or whose inputs are quantised too.
    """
    if not weights or not quantised_as(model.config):
        return model
    for name, layer in list(_quantised(model)):
        if weights not in NATIVE:
            layer.weight = nn.Parameter(layer.weight.dequantize(), requires_grad=False)
        elif (blocks := _blocks(layer.weight)) is not None:
            quantised = QuantisedLinear(blocks, layer.weight.dtype, layer.bias)
            if torch.equal(quantised.weight, layer.weight.dequantize()):
                model.set_submodule(name, quantised)
    if not any(_quantised(model)):
        model.hf_quantizer.remove_quantization_config(model)
    return model


def quantised_as(config: Any) -> str | None:
    """Return the name of the torchao config in a model's config; None if torchao did not quantise it."""
    words = config if isinstance(config, dict) else config.to_dict()
    found = words.get("quantization_config") or {}
    if found.get("quant_method") != "torchao":
        return None
    kind = found.get("quant_type") or {}
    of_all = kind.get("default") if isinstance(kind, dict) else None
    return str(of_all["_type"]) if isinstance(of_all, dict) else "another kind of torchao config"


def _quantised(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and hasattr(module.weight, "qdata"):
            yield name, module


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
