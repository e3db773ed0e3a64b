"""The datastore command: what it builds is what rest drafts from, and mistakes are one line.

Run: pytest tests/scripts/test_build_datastore.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from model.commands.command_line import UserError
from model.commands.model_options import ModelOptions
from model.methods.rest.datastore import BOUNDARY, Datastore
from scripts import build_datastore as corpus
from scripts.build_datastore import main

MODEL = ModelOptions().model_path
TEXTS = ("The ship left the harbor\nat dawn.", "At noon the ship came back.")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """The same two documents as JSON lines and as a text."""
    found = {"jsonl": tmp_path / "corpus.jsonl", "txt": tmp_path / "corpus.txt"}
    found["jsonl"].write_text("\n\n".join(json.dumps({"text": text}) for text in TEXTS) + "\n")
    found["txt"].write_text("\n" + "\n \n\n".join(TEXTS))
    return found


def build(*more: str | Path) -> Datastore:
    """Run the command with these texts and options, and load what it wrote."""
    out = Path(more[0]).with_name("built.npy")
    words = ["--text", *map(str, more)]
    assert main(["--model-path", MODEL, "--out", str(out), *words]) == 0
    return Datastore.load(str(out))


def tokens_of(text: str) -> list[int]:
    """Return a document's tokens and the boundary after it."""
    return [
        *AutoTokenizer.from_pretrained(MODEL)(text, add_special_tokens=False).input_ids,
        BOUNDARY,
    ]


def test_documents_are_lines_of_json_and_paragraphs_of_text(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = TEXTS
    expected = tokens_of(first) + tokens_of(second)
    assert build(files["jsonl"]).tokens.tolist() == expected
    assert "2 documents" in capsys.readouterr().out
    in_text = tokens_of(first + "\n") + tokens_of(second)
    assert build(files["txt"]).tokens.tolist() == in_text
    assert build(files["txt"], files["jsonl"]).tokens.tolist() == in_text + expected


def test_no_more_than_the_limit_is_read(files: dict[str, Path]) -> None:
    tokens = build(files["txt"], "--max-tokens", "5").tokens
    assert len(tokens) == 6 and tokens[-1] == BOUNDARY


def test_a_long_stretch_of_text_is_read_in_parts(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "MOST_LINES", 2)
    files["txt"].write_text("a\nb\nc\n")
    assert [*corpus.documents(files["txt"], "text")] == ["a\nb\n", "c\n"]


@pytest.mark.parametrize(
    ("content", "more", "text"),
    [
        ("\n", "", "holds no text"),
        ("a", "--max-tokens 0", "max_tokens: got 0; allowed: 1 to"),
        ("a", "--max-tokens 9999999999", "max_tokens: got 9999999999; allowed: 1 to"),
        ("a", "--model-path ./not-there", "tokenizer ./not-there"),
        ("a", "--out ./not-there/file", "out: got not-there/file"),
        (None, "", "cannot be read"),
    ],
)
def test_mistakes_are_one_line(content: str | None, more: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "corpus.txt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=text):
        build(file, *more.split())
    assert not list(tmp_path.glob("*.npy*"))


def test_a_text_is_not_overwritten(files: dict[str, Path]) -> None:
    content = files["txt"].read_bytes()
    with pytest.raises(UserError, match="one of the files to read; give another file"):
        build(files["txt"], "--out", str(files["txt"]))
    assert files["txt"].read_bytes() == content
