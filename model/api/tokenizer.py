"""Read a model's tokenizer, with special tokens in the middle of a text read as the model learned them.

Tokenizers that are a sentencepiece model, such as Llama's and Vicuna's, once put a word's beginning
after every special token: "</s>" and "▁USER" where a chat goes on. Transformers 4 reads them so
unless their settings say `legacy: false`. Transformers 5 takes no word for false, and reads second
turns in tokens that these models were not trained on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from .gguf import read


def read_tokenizer(path: str | Path, **words: Any) -> Any:
    """Return the tokenizer of a folder, a GGUF file or a hub name; errors as of `gguf.read`."""
    tokenizer = read(AutoTokenizer, path, **words)
    is_sentencepiece = str(getattr(tokenizer, "vocab_file", "")).endswith("tokenizer.model")
    if is_sentencepiece and getattr(tokenizer, "legacy", None) is False:
        settings = get_tokenizer_config(str(path), **words)
        if settings.get("legacy") is None:
            return read(AutoTokenizer, path, legacy=True, **words)
    return tokenizer
