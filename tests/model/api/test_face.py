"""The package as an editor and a notebook see it.

Run: pytest tests/model/api/test_face.py
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import torch

import model
from model import SpeculativeDecoder, TokenRecycling
from model.api.accelerate import Speculative
from model.methods import BUILT_IN, MethodName
from model.methods.recycling.drafter import RecyclingConfig

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "data/demo/model"
PROMPT = "USER: Tell me about the sea. ASSISTANT:"
FRESH = """
import sys, model
assert set(dir(model)) >= {*model.__all__}
assert "torch" not in sys.modules
"""
USER = """
import numpy as np
import torch
from model import (
    CustomMethod, SpeculativeDecoder, TokenRecycling, __version__, accelerated, recycling
)

decoder = TokenRecycling.from_pretrained("folder", output_id_topk=9)
reveal_type(decoder)
reveal_type(decoder.generate("text", max_new_tokens=5))
reveal_type(decoder.generate_all(["text", [1, 2]], max_new_tokens=[5, 6]))
reveal_type(decoder.generate_all(["text"], return_exceptions=True, n=2, temperature=1.0))
for index, one in decoder.as_completed(["text"], return_exceptions=True):
    reveal_type(one)
for piece in decoder.stream([{"role": "user", "content": "text"}]):
    reveal_type(piece)
for prompt in ([1, 2], np.array([1]), torch.tensor([1]), {"input_ids": [[1]]}):
    decoder.generate(prompt)
reveal_type(recycling())
reveal_type(__version__)
reveal_type(accelerated(decoder.target.model).accept_lengths)
accelerated(decoder.target.model).reset()
SpeculativeDecoder.from_pretrained("folder", CustomMethod("package.module:Drafter"))
SpeculativeDecoder.from_pretrained("folder", method="pld")
decoder.generate("text", do_sample=True)
decoder.generate("text", top_k="5")
decoder.generate(3)
SpeculativeDecoder.from_pretrained("folder", method="hybird")
"""
REVEALED = [
    "model.api.decoder.TokenRecycling",
    "model.api.output.GenerateOutput",
    "list[model.api.output.GenerateOutput]",
    "list[model.api.output.GenerateOutput | Exception]",
    "model.api.output.GenerateOutput | Exception",
    "model.api.output.StreamPiece",
    "model.api.accelerate.Speculative",
    "str",
    "list[int]",
]


def test_all_names_are_seen_before_the_first_use() -> None:
    subprocess.run([sys.executable, "-c", FRESH], cwd=ROOT, check=True)


def test_public_names_are_there() -> None:
    assert all(hasattr(model, name) for name in model.__all__)
    assert isinstance(model.recycling(output_id_topk=9), Speculative)
    assert model.__version__[0].isdigit()


def test_a_users_file_has_types(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(USER)
    words = ["-m", "mypy", "--no-pretty", str(file)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    found = [
        line.partition('Revealed type is "')[2].rstrip('"') for line in done.stdout.splitlines()
    ]
    assert [name for name in found if name] == REVEALED
    errors = [line for line in done.stdout.splitlines() if "error: " in line]
    named = ['"do_sample"', '"top_k"', '"int"', "Literal['hybird']"]
    assert len(errors) == len(named)
    assert all(name in error for name, error in zip(named, errors, strict=True))


def test_an_output_says_its_figures_in_one_line() -> None:
    decoder = TokenRecycling.from_pretrained(
        DEMO, dtype=torch.float32, output_id_topk=9, tree_version="2.2.2"
    )
    output = decoder.generate(PROMPT, max_new_tokens=30)
    assert output.mean_accepted_tokens == len(output.token_ids) / len(output.steps) > 1
    assert output.tokens_per_second == len(output.token_ids) / output.decode_time
    assert f"{output.mean_accepted_tokens:.2f} tokens a step (MAT)" in output.summary()
    assert output.summary().endswith(f"ended by {output.stop_reason}")
    piece = next(decoder.stream(PROMPT, max_new_tokens=3))
    for shown, begin in (
        (output, f"GenerateOutput({output.text[:9]!r}"[:-1]),
        (piece, "StreamPiece("),
        (piece.record, "StepRecord(tokens=["),
    ):
        assert repr(shown).startswith(begin)
        assert "\n" not in repr(shown) and len(repr(shown)) < 300
    assert str(piece) == piece.text
    decoder.target.model.config.name_or_path = "folder"
    assert repr(decoder) == (
        "TokenRecycling('folder', method='recycling', output_id_topk=9, device='cpu', dtype=torch.float32)"
    )


def test_docstrings_name_the_options_of_recycling_with_their_defaults() -> None:
    defaults = {item.name: item.default for item in dataclasses.fields(RecyclingConfig)}
    options = ", ".join(f"{name}={value!r}" for name, value in defaults.items()).replace("'", '"')
    decoders = (SpeculativeDecoder, TokenRecycling, SpeculativeDecoder.from_pretrained)
    assert all(f"`{options}`" in str(inspect.getdoc(one)) for one in decoders)
    listed = re.findall(r"^- (\w+): ", str(inspect.getdoc(TokenRecycling)), re.MULTILINE)
    assert listed == list(defaults)


def test_an_editor_knows_the_methods() -> None:
    assert typing.get_args(MethodName) == tuple(BUILT_IN)
