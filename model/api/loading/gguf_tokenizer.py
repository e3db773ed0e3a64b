"""What the keys of a GGUF file say of its tokenizer, beyond what transformers reads: read, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import normalizers, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_TOKENIZER_MAPPING,
    GGUF_TOKENIZER_TYPES,
)

# llama.cpp's ways to split text into words (`tokenizer.ggml.pre`): GPT-2's, and GPT-2's after single digits.
AS_GPT2 = {"gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "phi-2", "exaone4"}
DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
# Those where a word that is a token is never cut, and where texts begin with BOS unless the file says otherwise.
WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"}
WHOLE_WORDS |= {"lfm2", "tekken"}
# Keys that say what others say, that are read elsewhere, or that other kinds of tokenizers have.
HARMLESS = {"chat_templates", "huggingface.json", "ggml.token_type_count", "ggml.add_sep_token"}
HARMLESS |= {"ggml.remove_extra_whitespaces"}
NAMES = (
    "eot",
    "eom",
    "cls",
    "mask",
    "seperator",
    "separator",
    "prefix",
    "suffix",
    "middle",
    "fsep",
)
HARMLESS |= {f"ggml.{name}_token_id" for name in NAMES}


def check_tokenizer_keys(file: str, metadata: Mapping[str, Any]) -> None:
    """Raise ValueError for a key that changes the tokens of a text and cannot be read."""
    known = {*HARMLESS, *(one for of_kind in GGUF_TOKENIZER_MAPPING.values() for one in of_kind)}
    allowed = {"ggml.model": list(GGUF_TOKENIZER_TYPES)}
    if metadata.get("tokenizer.ggml.model") == "gpt2":
        allowed["ggml.pre"] = sorted({*AS_GPT2, *DIGITS, *GGUF_PRE_TOKENIZER_SPLITS})
    for name in [name for name in metadata if name.startswith("tokenizer.")]:
        short, value = name.removeprefix("tokenizer."), metadata[name]
        is_known = short in known or short.startswith(("chat_template.", "ggml.fim_"))
        if not is_known or value not in allowed.get(short, [value]):
            words = ", ".join(allowed.get(short, ["a file without this key, which is not read"]))
            raise ValueError(f"{file}: {name}: got {value}; allowed: {words}")


def complete_tokenizer(tokenizer: Any, metadata: Mapping[str, Any]) -> None:
    """Set what transformers does not read: how words are split and merged, and where a space is put before."""
    backend = tokenizer.backend_tokenizer
    kind, split = (metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind == "gpt2" and split in DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(False)])
    elif kind == "gpt2" and split in WHOLE_WORDS:
        backend.model.ignore_merges = True
        tokenizer.add_bos_token = metadata.get("tokenizer.ggml.add_bos_token", True)
    elif kind == "llama":
        is_gemma = metadata["general.architecture"].startswith("gemma")
        has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma)
        # As sentencepiece: at the beginning, and after each special token.
        prepend = [normalizers.Prepend("▁")] if has_prefix else []
        backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = None
