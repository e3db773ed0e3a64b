"""The exported `custom_generate` folder, loaded as transformers loads it.

Run: pytest tests/scripts/test_export_custom_generate.py
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

from model.commands.command_line import UserError
from scripts.export_custom_generate import GENERATE, export, main
from tests.hang import HANG

DEMO = Path(__file__).resolve().parents[2] / "data/demo/model"
PROMPT = "USER: Tell me about the sea. ASSISTANT:"


@pytest.fixture(autouse=True)
def own_modules_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let transformers copy the folder's code to a place of this test."""
    for module in ("transformers.dynamic_module_utils", "transformers.utils.hub"):
        if hasattr(sys.modules[module], "HF_MODULES_CACHE"):
            monkeypatch.setattr(f"{module}.HF_MODULES_CACHE", str(tmp_path / "modules"))
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("transformers_modules"):
            del sys.modules[name]


def inputs_of(tokenizer: Any) -> dict[str, torch.Tensor]:
    """Return a prompt's tensors."""
    inputs = tokenizer(PROMPT, return_tensors="pt")
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def test_generate_takes_the_folder(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path / "out")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    inputs = inputs_of(tokenizer)
    options = {"max_new_tokens": 30, "repetition_penalty": 1.1, "do_sample": False}
    folder = {"custom_generate": str(tmp_path / "out"), "trust_remote_code": True}
    expected = model.generate(**inputs, **options)
    first = model.generate(**inputs, **options, **folder)
    num_steps = len(model.__dict__["_speculative"].steps)
    again = model.generate(**inputs, **options, **folder)
    assert torch.equal(first, expected) and torch.equal(again, expected)
    assert len(model.__dict__["_speculative"].steps) < num_steps < 30, "the matrix should live on"
    drafted = model.generate(
        **inputs, **options, **folder, method="pld", method_options={"num_pred_tokens": 4}
    )
    assert torch.equal(drafted, expected)
    assert model.__dict__["_speculative"].method == "pld"
    with pytest.raises(ValueError, match="num_pred_tokens: got 0"):
        model.generate(**inputs, **folder, method="pld", method_options={"num_pred_tokens": 0})
    with pytest.raises(ValueError, match="assistant_model: got a LlamaForCausalLM; allowed: none"):
        model.generate(**inputs, **folder, assistant_model=model)


def test_a_model_folder_with_it_generates_by_itself(tmp_path: Path) -> None:
    folder = tmp_path / "my_model"
    shutil.copytree(DEMO, folder)
    export(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=True
    ).eval()
    plain = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    inputs = inputs_of(tokenizer)
    text = tokenizer.decode(plain.generate(**inputs, max_new_tokens=30)[0])
    stop = text[-12:-8]
    options = {"max_new_tokens": 30, "stop_strings": [stop], "tokenizer": tokenizer}
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=HANG)
    found = model.generate(**inputs, **options, streamer=streamer)
    assert torch.equal(found, plain.generate(**inputs, **options))
    assert model.__dict__["_speculative"].steps[-1].stop_reason == "criteria"
    streamed = "".join(streamer)
    assert streamed and stop in streamed and tokenizer.decode(found[0]).endswith(streamed)


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("token_recycling", "model"):
        monkeypatch.setitem(sys.modules, f"{name}.api.accelerate", None)
    with pytest.raises(ImportError, match="the package token-recycling is not installed"):
        exec(compile(GENERATE, "generate.py", "exec"), {})


def test_files_that_are_there_are_kept(tmp_path: Path) -> None:
    file = export(tmp_path)[0]
    file.write_text("mine")
    with pytest.raises(UserError, match=r"exists already; give --overwrite"):
        export(tmp_path)
    assert file.read_text() == "mine"
    assert main(["--out", str(tmp_path), "--overwrite"]) == 0
    assert file.read_text() == GENERATE
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="out: cannot make"):
        export(tmp_path / "file")
