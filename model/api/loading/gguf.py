"""GGUF files as models: transformers reads config, tokenizer and weights from the one file.

Its weights stay in their bits or are dequantised, as `weights.py` says.

Functions take a folder or hub name too, and then call transformers as usual, so that a caller needs
no case for either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import RLock
from typing import Any

import transformers
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from ...machine.files import refuse_lfs_pointer

MAGIC = b"GGUF"
# Transformers unpacks by the first, and places the tensors by the second.
PACKAGES = ("gguf", "accelerate")
# 4.57 takes the first special token of a Llama file for the one that ends texts.
OLDEST_TRANSFORMERS = (5, 23)
# Held while names of transformers or gguf are patched for a load.
ONE_AT_A_TIME = RLock()


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
    package, before = import_module("gguf"), transformers.logging.get_verbosity()
    # Each file is parsed once, not for the config, the tokenizer and the weights each, and each table of names is
    # made once, not for each module: of a model with 30 layers and 49,152 tokens together 11 s.
    once = {
        "GGUFReader": partial(_reader, package.GGUFReader),
        "get_tensor_name_map": cache(package.get_tensor_name_map),
    }
    with patched(vars(package), once):
        transformers.logging.set_verbosity_error()  # of notes about keys of the file that are not needed
        try:
            return auto_class.from_pretrained(file.parent, gguf_file=file.name, **words)
        finally:
            transformers.logging.set_verbosity(before)


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


def forget_parsed() -> None:
    """Free the contents of the file that was read last."""
    _parsed.cache_clear()


def _reader(parse: Callable[[str], Any], path: str | Path) -> Any:
    changed = Path(path).stat()
    return _parsed(parse, str(path), changed.st_mtime_ns, changed.st_size)


@lru_cache(maxsize=1)
def _parsed(parse: Callable[[str], Any], path: str, *changed: int) -> Any:
    """Return the parsed file; `changed` tells its versions apart."""
    return parse(path)


@contextmanager
def patched(names: dict[str, Any], values: dict[str, Any]) -> Iterator[None]:
    """Within the block names of transformers or gguf have other values; one thread at a time."""
    with ONE_AT_A_TIME:
        own = {name: names[name] for name in values}
        names.update(values)
        try:
            yield
        finally:
            names.update(own)
