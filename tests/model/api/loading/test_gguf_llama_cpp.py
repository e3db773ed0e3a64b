"""llama.cpp itself on the files of eight families: each of its greedy tokens is one of ours, up to near-ties.

llama.cpp is no requirement of the tests. Install it beside, and run this file alone:

    pip install --target .venv/llama-cpp --no-deps xllamacpp
    PYTHONPATH=.venv/llama-cpp pytest tests/model/api/loading/test_gguf_llama_cpp.py
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from model.api.loading.weights import read_weights
from tests.model.api.loading.gguf_families import (
    CONTEXT,
    FAMILIES,
    ORIGINAL,
    family_model,
    llama3,
    write_family,
)

llama_cpp: Any = pytest.importorskip("xllamacpp", reason="llama.cpp (xllamacpp) is not installed")

PROMPT, NEW = 90, 48  # tokens; the files' original context has 64
NEAR_TIE = 1e-3  # of logits; their spread is 1.6
ENDS = [0, 2]  # llama.cpp takes <|endoftext|> for an end, too
# Scaled frequencies of another Llama than Meta's.
OF_ALL = {**FAMILIES, "another Llama": llama3(ORIGINAL)}


def served_tokens(file: Path, prompt_ids: list[int]) -> list[int]:
    """Return llama.cpp's greedy tokens, all in float32."""
    params = llama_cpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.verbosity = CONTEXT, 1, 0, 0
    params.cache_type_k = params.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup = False
    for of_pass in (params.cpuparams, params.cpuparams_batch):
        of_pass.n_threads = 1
    server = llama_cpp.Server(params)
    asked = {"prompt": prompt_ids, "n_predict": NEW, "temperature": 0, "top_k": 1}
    asked |= {"return_tokens": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.listening_address}/completion", json.dumps(asked).encode()
    )
    with urllib.request.urlopen(request) as reply:
        tokens: list[int] = json.load(reply)["tokens"]
    return tokens


@pytest.mark.parametrize("name", OF_ALL)
def test_its_tokens_are_ours(name: str, tmp_path: Path) -> None:
    family = OF_ALL[name]
    file = write_family(tmp_path / "tiny.gguf", family, family_model(family))
    torch.manual_seed(2)
    prompt_ids = torch.randint(3, 250, (PROMPT,)).tolist()
    found = served_tokens(file, prompt_ids)
    model = read_weights(file, "dequantised", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt_ids, *found]])).logits[0, PROMPT - 1 : -1]
    logits[:, ENDS] = -torch.inf
    behind = logits.max(-1).values - logits.gather(-1, torch.tensor(found)[:, None])[:, 0]
    assert len(found) == NEW and len(set(found)) > 1
    print(
        f"{name}: {int((behind > 0).sum())} of {NEW} tokens differ, by {behind.max():.1e} at most"
    )
    assert behind.max() < NEAR_TIE
