"""The corpus command: what it builds is what samd drafts from, and mistakes are one line.

Run: pytest tests/scripts/test_build_automaton.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from model.commands.command_line import UserError
from model.commands.model_options import ModelOptions
from model.methods.samd.automata import BOUNDARY, Follower, StaticAutomaton
from scripts.build_automaton import main

MODEL = ModelOptions().model_path
TEXTS = ("The ship left the harbor at dawn.", "At noon the ship came back.")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two documents, and an empty line between them."""
    file = tmp_path / "corpus.jsonl"
    file.write_text("\n\n".join(json.dumps({"text": text}) for text in TEXTS) + "\n")
    return file


def build(corpus: Path, *more: str) -> StaticAutomaton:
    """Run the command and load what it wrote."""
    out = corpus.with_name(f"built-{len(more)}.safetensors")
    assert main([str(corpus), "--tokenizer", MODEL, "--out", str(out), *more]) == 0
    return StaticAutomaton.load(str(out))


def test_every_document_can_be_continued(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    automaton = build(corpus)
    for text in TEXTS:
        token_ids = tokenizer(text, add_special_tokens=False).input_ids
        follower = Follower(automaton)
        follower.extend(token_ids[:3])
        assert follower.match(100) == (3, token_ids[3:], "corpus")
    assert "2 documents" in capsys.readouterr().out


def test_no_more_than_the_limit_is_read(corpus: Path) -> None:
    tokens = build(corpus, "--max-tokens", "5").tokens
    assert len(tokens) == 6 and tokens[-1] == BOUNDARY
    assert BOUNDARY not in tokens[:5]


@pytest.mark.parametrize(
    ("content", "more", "text"),
    [
        ('{"text": "a"}\nnot json\n', "", "line 2: is not JSON"),
        ('{"body": "a"}\n', "", "line 1: expected an object with a text under 'text'"),
        ('{"text": 5}\n', "", "line 1: expected"),
        ("[1]\n", "", "line 1: expected"),
        ('{"text": "\\ud800 half"}\n', "", "line 1: holds half of a surrogate pair"),
        ("\n", "", "holds no text"),
        ('{"text": "a"}\n', "--max-tokens 0", "max_tokens: got 0; allowed: 1 to"),
        ('{"text": "a"}\n', "--tokenizer ./not-there", "tokenizer ./not-there"),
        ('{"text": "a"}\n', "--out ./not-there/file", "out: got not-there/file"),
        (None, "", "cannot be read"),
    ],
)
def test_mistakes_are_one_line(content: str | None, more: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=text):
        build(file, *more.split())
    assert not list(tmp_path.glob("*.safetensors*"))


def test_the_corpus_is_not_overwritten(corpus: Path) -> None:
    content = corpus.read_bytes()
    with pytest.raises(UserError, match="one of the files to read; give another file"):
        main([str(corpus), "--tokenizer", MODEL, "--out", str(corpus)])
    assert corpus.read_bytes() == content
