"""Set-up of a chat: checks before it begins, and loading and saving the matrix.

Run: pytest tests/model/chat/test_setup.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.api.decoder import SpeculativeDecoder
from model.chat import __main__ as chat
from model.chat import dialogue as chat_setup
from model.commands import loading
from model.commands.command_line import UserError, run_command
from tests.model.chat.test_chat import QUESTION, SHORT, figures_of
from tests.model.chat.test_dialogue import DEMO

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if the weights would load."""
    monkeypatch.setattr(
        chat_setup, "load_target", lambda *_: pytest.fail("the weights were about to load")
    )


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--temperature -1", "temperature: got -1.0"),
        ("--top-p 0.5", "need sampling"),
        ("--max-new-tokens 0", "max_new_tokens: got 0; allowed: 1 or more"),
        ("--method recycle", "method: got 'recycle'; allowed: vanilla, "),
        ("--method sps", "method sps: has no default for an option: draft_model"),
        ("--no-such-option", "unrecognized arguments"),
        ("--model-path {}/none", "allowed: a folder with a model"),
        ("--device nowhere", "device: got 'nowhere'"),
        ("--prompt= ", "prompt: got an empty text"),
        ("--show-matrix sea", "give --prompt or --load-matrix"),
        (
            "--load-matrix x --show-matrix sea --save-matrix y",
            "save_matrix: got it with --show-matrix and no prompt",
        ),
        (
            "--load-matrix x --show-matrix sea --top-k 3",
            "top_k: got it with --show-matrix and no prompt",
        ),
        (
            "--load-matrix x --show-matrix sea --seed 0",
            "seed: got it with --show-matrix and no prompt",
        ),
        ("--load-matrix {}/none.safetensors", r"load_matrix \S*none\.safetensors: "),
        ("--load-matrix {}/other.safetensors", "matrix: got torch.int32 of shape"),
        ("--save-matrix {}/none/file", "allowed: a file in an existing, writable folder"),
        ("--method pld --save-matrix {}/file", "the method pld keeps nothing across prompts"),
        ("--method pld --prompt x --show-matrix sea", "keeps no matrix; give --method recycling"),
        ("--prompt x --show-matrix 8192", "show_matrix: got 8192; allowed: ids below 8192"),
        ("--prompt x --show-matrix seaseasea", "is [0-9]+ tokens: .*; give one of them, or an id"),
    ],
)
def test_a_mistake_is_one_line_before_the_weights_load(
    words: str,
    error: str,
    tmp_path: Path,
    no_weights: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = {"adjacency": torch.zeros(5, 8, dtype=torch.int32), "shares": torch.zeros(5, 8)}
    save_file(rows, tmp_path / "other.safetensors")
    given = [word.format(tmp_path) for word in re.split(r" (?=\S)", words)]
    monkeypatch.setattr("sys.argv", ["chat", *given])
    with pytest.raises(SystemExit) as exit_:
        run_command(chat.run)
    out, err = capsys.readouterr()
    assert exit_.value.code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert re.search(error, err), err


def test_a_prompt_beyond_the_context_is_refused_before_the_weights_load(no_weights: None) -> None:
    with pytest.raises(UserError, match=r"prompt: got \d+ tokens; allowed: fewer than"):
        chat.run(["--prompt", "sea " * 5000])


def test_the_matrix_is_saved_shown_and_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tmp_path / "matrix.safetensors")
    asked = [*SHORT, "--prompt", QUESTION, "--save-matrix", file, "--show-matrix", " sea"]
    assert chat.run(asked) == 0
    answer, shown = capsys.readouterr().out.split("\n", 1)
    matrix = load_file(file)["adjacency"]
    tokenizer = SpeculativeDecoder.from_pretrained(DEMO, dtype=torch.float32).tokenizer
    (token,) = tokenizer(" sea", add_special_tokens=False).input_ids
    head, *rows = shown.splitlines()
    assert answer and head.startswith(f"token {token} ")
    assert [int(row.split()[0]) for row in rows] == list(range(8))
    assert [int(row.split()[1]) for row in rows] == matrix[token].tolist()
    assert [row.split()[2] for row in rows] == [
        repr(piece) for piece in tokenizer.convert_ids_to_tokens(matrix[token].tolist())
    ]
    unseen = int((matrix.sum(dim=1) == 0).nonzero()[0])
    monkeypatch.setattr(chat_setup, "load_target", lambda *_: pytest.fail("weights are not needed"))
    for given, expected in ((" sea", shown), (str(token), shown)):
        assert chat.run(["--load-matrix", file, "--show-matrix", given]) == 0
        assert capsys.readouterr().out == expected
    chat.run(["--load-matrix", file, "--show-matrix", str(unseen)])
    assert "nothing learned yet" in capsys.readouterr().out


def test_a_loaded_matrix_shortens_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "matrix.safetensors")
    chat.run([*SHORT, "--prompt", QUESTION, "--save-matrix", file])
    cold, cold_err = capsys.readouterr()
    chat.run([*SHORT, "--prompt", QUESTION, "--load-matrix", file])
    hot, hot_err = capsys.readouterr()
    assert hot == cold
    assert figures_of(hot_err)[0][2] < figures_of(cold_err)[0][2], "as many steps as without it"


def test_a_tokenizer_without_a_template_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = loading.load_config_and_tokenizer

    def without_template(path: str, *trust: bool) -> tuple[Any, Any]:
        config, tokenizer = original(path, *trust)
        tokenizer.chat_template = None
        return config, tokenizer

    monkeypatch.setattr(loading, "load_config_and_tokenizer", without_template)
    assert chat.run([*SHORT, "--prompt", QUESTION]) == 0
    out, err = capsys.readouterr()
    assert chat_setup.NO_TEMPLATE in err and out.strip()


def test_a_template_that_fails_is_one_line(
    no_weights: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = loading.load_config_and_tokenizer

    def with_broken_template(path: str, *trust: bool) -> tuple[Any, Any]:
        config, tokenizer = original(path, *trust)
        tokenizer.chat_template = "{{ raise_exception('no\nuser') }}"
        return config, tokenizer

    monkeypatch.setattr(loading, "load_config_and_tokenizer", with_broken_template)
    with pytest.raises(UserError, match=r"its chat template fails: no$"):
        chat.run(["--prompt", QUESTION])


def test_a_closed_input_and_bytes_that_are_no_text_are_refused(
    no_weights: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        UserError, match="prompt: got bytes that are not text in this locale; give UTF-8"
    ):
        chat.run(["--prompt", "a\udcff"])
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UserError, match="standard input is closed; give --prompt"):
        chat.run([])
