"""Answers that part are replayed with the run's own model, prompts and methods, and judged.

Run: pytest tests/evaluation/checking/test_rerun.py
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from evaluation.checking.tie_or_bug import TIE, Judge, Judgement
from evaluation.equal import main
from evaluation.speed import main as speed
from model.commands.command_line import UserError
from tests.evaluation.conftest import read_rows, run, write_rows

Capture = pytest.CaptureFixture[str]
# A token that the tiny model never chooses.
UNLIKELY = 5


@pytest.fixture(scope="module")
def answers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with plain answers to two questions in bfloat16, and recycling's of the same tokens."""
    folder = tmp_path_factory.mktemp("replay")
    short = "--threads 1 --warmup 0 --max-new-tokens 16 --question-end 2 --dtype bfloat16"
    for method in ("vanilla", "recycling"):
        file = folder / f"{method}.jsonl"
        assert run(method, ["--model-path", tiny_model, *short.split()], file) == 0
    # What rounding did here is no matter: the tests put in differences of their own.
    rows = read_rows(folder / "vanilla.jsonl")
    write_rows(folder / "recycling.jsonl", rows)
    return folder


def _change(folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copy the folder, with the first choice of recycling's last row changed."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    rows = read_rows(copy / "recycling.jsonl")
    change(rows[-1]["choices"][0])
    write_rows(copy / "recycling.jsonl", rows)
    return copy


def _wrong_token(choice: dict[str, Any]) -> None:
    choice["token_ids"][-1][3] = UNLIKELY


def _words(folder: Path, model: Path, *more: str) -> list[str]:
    names = ["--jsonfile1", "vanilla.jsonl", "--jsonfile2", "recycling.jsonl"]
    return ["--file-path", str(folder), *names, "--model-path", str(model), *more]


def test_a_wrong_token_is_a_bug(
    answers: Path, tiny_model: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = _change(answers, tmp_path, _wrong_token)
    assert main(_words(folder, tiny_model, "--keep-verdict")) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    judged = json.loads(last)["judged"]
    assert (judged["ties"], judged["bugs_and_others"]) == (0, 1)
    (verdict,) = judged["verdicts"]
    assert verdict["verdict"] == "BUG" and verdict["position"] == 3
    assert verdict["tokens"][1] == UNLIKELY and verdict["gap"] > verdict["bound"]
    assert max(verdict["worst_errors"]) <= 3 * verdict["noise"], "the engine itself is right"
    assert any("BUG: tokens" in line for line in lines)
    assert "1 bugs and other differences in 2 questions: 50.0%, 95% [1.3%, 98.7%]" in lines
    # Tables read what was kept: the row is not lossless, in half precision too.
    speed(
        [
            "--file-path",
            str(folder / "recycling.jsonl"),
            "--base-path",
            str(folder / "vanilla.jsonl"),
        ]
    )
    assert "NOT LOSSLESS: answers other than the baseline's: 1 of 2 (0 near-ties, 1 bugs)" in (
        capsys.readouterr().out
    )


def test_the_run_s_penalty_and_system_prompt_count(
    tiny_model: Path, tmp_path: Path, capsys: Capture
) -> None:
    short = "--threads 1 --warmup 0 --max-new-tokens 16 --question-end 1 --dtype bfloat16"
    given = ["--model-path", tiny_model, *short.split(), "--system-prompt", "Be brief."]
    assert run("vanilla", given, tmp_path / "plain.jsonl") == 0
    for name in ("vanilla", "recycling"):
        assert run("vanilla", [*given, "--repetition-penalty", 3], tmp_path / f"{name}.jsonl") == 0
    tokens = [
        read_rows(tmp_path / f"{name}.jsonl")[0]["choices"][0]["token_ids"][0]
        for name in ("vanilla", "plain")
    ]
    place = next(i for i, (one, other) in enumerate(zip(*tokens, strict=False)) if one != other)
    rows = read_rows(tmp_path / "recycling.jsonl")
    rows[0]["choices"][0]["token_ids"][0][place] = tokens[1][place]
    write_rows(tmp_path / "recycling.jsonl", rows)
    assert main(_words(tmp_path, tiny_model)) == 1
    (verdict,) = json.loads(capsys.readouterr().out.splitlines()[-1])["judged"]["verdicts"]
    penalised, likeliest = verdict["logits"]
    assert verdict["position"] == place and penalised > likeliest, "scores are those of the run"


def test_a_model_in_a_pickle_judges_where_it_is_allowed(
    tiny_model: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder, model = tmp_path / "answers", tmp_path / "pickled"
    shutil.copytree(tiny_model, model)
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    short = "--threads 1 --warmup 0 --max-new-tokens 8 --question-end 1 --dtype bfloat16"
    given = ["--model-path", model, *short.split(), "--allow-pickle"]
    for name in ("vanilla", "recycling"):
        assert run("vanilla", given, folder / f"{name}.jsonl") == 0
    wrong = _change(folder, tmp_path, _wrong_token)
    with pytest.raises(UserError, match="give --allow-pickle"):
        main(_words(wrong, model))
    assert main(_words(wrong, model, "--allow-pickle", "--device", "cpu")) == 1
    assert "BUG: tokens" in capsys.readouterr().out


def test_ties_alone_are_no_error_but_anything_else_is(
    answers: Path, tiny_model: Path, tmp_path: Path, capsys: Capture, monkeypatch: Any
) -> None:
    right = Judge.judge

    def tie(self: Judge, *args: Any) -> Judgement:
        return replace(right(self, *args), verdict=TIE)

    monkeypatch.setattr(Judge, "judge", tie)
    folder = _change(answers, tmp_path / "a", _wrong_token)
    assert main(_words(folder, tiny_model)) == 0
    assert "1 ties in 2 questions" in capsys.readouterr().out
    # A tie in one answer does not excuse another.
    file = folder / "recycling.jsonl"
    first, *rest = read_rows(file)
    first["choices"][0]["token_ids"][-1].pop()
    write_rows(file, [first, *rest])
    assert main(_words(folder, tiny_model)) == 1
    assert "1 ties in 2 questions" in capsys.readouterr().out
    # An answer that ends early has no token to judge.
    folder = _change(answers, tmp_path / "b", lambda choice: choice["token_ids"][-1].pop())
    assert main(_words(folder, tiny_model)) == 1
    assert "not judged: tokens differ" in capsys.readouterr().out


def test_what_cannot_be_judged_is_one_line(answers: Path, tiny_model: Path, tmp_path: Path) -> None:
    def with_meta(name: str, **changes: Any) -> Path:
        folder = _change(answers, tmp_path / name, _wrong_token)
        for file in folder.glob("*.meta.json"):
            file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        return folder

    lost = _change(answers, tmp_path / "lost", _wrong_token)
    (lost / "recycling.meta.json").unlink()
    other = write_rows(
        tmp_path / "other.jsonl", [{"question_id": 1, "category": "qa", "turns": ["Who?"]}]
    )
    plain = _change(answers, tmp_path / "plain", _wrong_token)
    two, sidecar = _change(answers, tmp_path / "two", _wrong_token), "recycling.meta.json"
    meta = json.loads((two / sidecar).read_text()) | {"model_fingerprint": "0"}
    (two / sidecar).write_text(json.dumps(meta))
    cases = [
        (with_meta("sampled", temperature=0.5), [], "these answers were sampled"),
        (lost, [], "the sidecar of .*recycling.jsonl has no 'method'"),
        (plain, ["--question-file", str(other)], "question_file: .* is not the one"),
        (with_meta("option", options={"nope": 1}), [], "the method of the answers cannot be made"),
        (with_meta("class", method="some.module:Drafter"), [], "a class that only its path names"),
        (with_meta("template", conv_template="raw"), [], "the prompt has .* tokens, the answers"),
        (with_meta("type", dtype="float99"), [], "dtype: got 'float99'; allowed: auto, float32"),
        (with_meta("weights", model_fingerprint="0"), [], "got weights .*; the answers are of 0"),
        (two, [], "has model_fingerprint '.*', .*recycling.jsonl '0'; allowed: answers of equal"),
    ]
    for folder, more, says in cases:
        with pytest.raises(UserError, match=says) as caught:
            main(_words(folder, tiny_model, *more))
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="question_file: got it without --model-path"):
        words = _words(plain, tiny_model)[:-2]
        main([*words, "--question-file", str(other)])
