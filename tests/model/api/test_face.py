"""The package as an editor and a notebook see it.

Run: pytest tests/model/api/test_face.py
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import model
from model.api.custom_generate import Speculative

ROOT = Path(__file__).resolve().parents[3]
FRESH = """
import sys, model
assert set(dir(model)) >= {*model.__all__}
assert "torch" not in sys.modules
"""
USER = """
import numpy as np
import torch
from model import SpeculativeDecoder, TokenRecycling, __version__, accelerate, recycling

decoder = TokenRecycling.from_pretrained("folder", output_id_topk=9)
reveal_type(decoder)
reveal_type(decoder.generate("text", max_new_tokens=5))
for piece in decoder.stream([{"role": "user", "content": "text"}]):
    reveal_type(piece)
for prompt in ([1, 2], np.array([1]), torch.tensor([1]), {"input_ids": [[1]]}):
    decoder.generate(prompt)
reveal_type(recycling())
reveal_type(__version__)
decoder.generate("text", do_sample=True)
decoder.generate(3)
"""
REVEALED = [
    "model.api.decoder.TokenRecycling",
    "model.api.output.GenerateOutput",
    "model.api.output.StreamPiece",
    "model.api.custom_generate.Speculative",
    "str",
]


def test_all_names_are_seen_before_the_first_use() -> None:
    subprocess.run([sys.executable, "-c", FRESH], cwd=ROOT, check=True)


def test_public_names_are_there() -> None:
    assert all(hasattr(model, name) for name in model.__all__)
    importlib.import_module("model.recycling.tree_template_")  # an old path of the function's name
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
    assert len(errors) == 2 and '"do_sample"' in errors[0] and '"int"' in errors[1]
