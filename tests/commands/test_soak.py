"""The soak run: what is flat, what grows, and the command on a few questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evaluation.inference.command import participant_of
from model.commands.command_line import UserError
from model.methods.recycling.auto_tree import library_of_guesses
from tests.commands.soak import Block, is_flat, main


def block(resident: int, files: int = 9) -> Block:
    """Return a block."""
    return Block(10, resident, files, 2.0, 100.0)


def test_memory_that_grows_and_files_left_open_are_told() -> None:
    assert is_flat([block(100), block(200), block(205)]), "the first block warms up"
    assert not is_flat([block(100), block(200), block(240)])
    assert not is_flat([block(200), block(200), block(200, files=10)])


def test_the_command_answers_round_and_round(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        ["--num-questions", "34", "--block", "17", "--max-new-tokens", "4", "--methods", "pld"]
    )
    *_, last = capsys.readouterr().out.splitlines()
    blocks = json.loads(last)["pld"]
    assert [entry["questions"] for entry in blocks] == [17, 34]
    assert code == (0 if is_flat([Block(**entry) for entry in blocks]) else 1)


@pytest.mark.parametrize("words", ["--methods nope", "--block 0", "--threads 0"])
def test_bad_options_are_one_line(words: str) -> None:
    with pytest.raises(UserError, match="got"):
        main(words.split())


def test_what_cannot_be_answered_is_refused_before_the_weights_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr("tests.commands.soak.load_target")
    with pytest.raises(UserError, match=r"got '\./none'; allowed: a folder"):
        main(["--methods", "sps", "--draft-model", "./none"])
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"question_id": 7, "category": "qa", "turns": ["long " * 4000]}))
    says = "question 7: got a prompt of .* fewer than the model's context of 3072"
    with pytest.raises(UserError, match=says):
        main(["--methods", "vanilla", "--question-file", str(file)])


def test_a_method_that_cannot_run_here_is_refused_before_the_weights_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr("tests.commands.soak.load_target")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    library_of_guesses.cache_clear()
    with pytest.raises(UserError, match="no C\\+\\+ compiler: got no-such-compiler; install g"):
        main(["--methods", "vanilla", "recycling-auto"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--methods", "vanilla", "sps", "--model-path", "elsewhere"],
            "draft_model: got none.* sps",
        ),
        (["--methods", "vanilla", "pld", "--draft-model", "mine"], "draft_model: got mine"),
        (
            ["--methods", "vanilla", "sps", "--draft-model", "./mine"],
            "got './mine'; allowed: a folder",
        ),
        (
            ["--methods", "vanilla", "generate-assisted", "--draft-model", "./mine"],
            "got './mine'; allowed: a folder",
        ),
        (["--methods", "vanilla", "medusa --heads ./mine"], "heads: got 'mine'; allowed: a folder"),
        (
            ["--methods", "vanilla", "medusa", "--model-path", "elsewhere"],
            "heads: got none; name the folder of medusa's heads",
        ),
    ],
)
def test_a_draft_model_is_given_where_one_is_wanted(options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(options)


@pytest.mark.parametrize("name", ["nope", "vanilla-auto", "hybrid-auto"])
def test_an_unknown_method_or_one_without_an_automatic_budget_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="recycling-auto"):
        participant_of(name)
