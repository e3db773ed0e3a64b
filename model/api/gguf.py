"""GGUF files as models: transformers reads config, tokenizer and weights from the one file.

The weights stay in their bits (`packed_gguf.py`) or are dequantised, as `choose_weights` says.

Functions take a folder or hub name too, and then call transformers as usual, so that a caller needs
no case for either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..kernels.packed import TYPES
from ..kernels.short_pass import DTYPES, short_pass_kernel
from ..machine.files import refuse_lfs_pointer
from ..options import WEIGHTS, unknown_name

MAGIC = b"GGUF"
# Transformers unpacks by the first, and places the tensors by the second.
PACKAGES = ("gguf", "accelerate")
# 4.57 takes the first special token of a Llama file for the one that ends texts.
OLDEST_TRANSFORMERS = (5, 23)


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
    """Load by an auto class of transformers, such as `AutoConfig`, from a GGUF file, a folder or a hub name.

    Raises:
        ValueError: if the name is that of a GGUF file, and it cannot be read.
    """
    if not is_gguf(path):
        return auto_class.from_pretrained(path, **words)
    check_gguf(path)
    file = Path(path).absolute()
    with _only_errors():
        return auto_class.from_pretrained(file.parent, gguf_file=file.name, **words)


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


@contextmanager
def _only_errors() -> Iterator[None]:
    """Silence transformers' notes about keys of the file that are not needed."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
