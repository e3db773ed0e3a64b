"""The leaderboard beside a second run of vanilla: what it says, and where it says nothing.

Run: pytest tests/evaluation/reporting/test_noise_floor.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from evaluation import speed
from evaluation.answers.record import NOISE_FLOOR
from evaluation.leaderboard import main
from model.commands.command_line import UserError
from tests.evaluation.answers.answer_rows import make_row, write_answers

META = {"model_path": "models/tiny", "bench_name": "spec_bench", "device": "cpu"}
CATEGORIES = ("writing", "translation", "summarization", "qa", "math_reasoning", "rag")
Capture = pytest.CaptureFixture[str]


def _write(folder: Path, name: str, seconds: float, spread: float = 0.0, **meta: Any) -> Path:
    """Write answers to 24 questions of 12 tokens, each of about so many seconds."""
    rng = random.Random(name)
    rows = [
        make_row(
            place,
            CATEGORIES[place % 6],
            [1] * 12 if name.startswith("vanilla") else [3] * 4,
            seconds * rng.uniform(1 - spread, 1 + spread),
        )
        for place in range(24)
    ]
    meta = {"method": name.partition("-")[0], "model_id": name} | meta
    return write_answers(folder / f"{name}.jsonl", rows, META | meta)


def _again(folder: Path, seconds: float, spread: float = 0.0, **meta: Any) -> Path:
    return _write(folder, "vanilla-again", seconds, spread, role=NOISE_FLOOR, **meta)


def _run(capsys: Capture, *words: object) -> tuple[str, dict[str, Any]]:
    assert main([*map(str, words), "--json", "-"]) == 0
    text, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    return text, json.loads(last)


def test_it_is_no_entry_and_methods_within_it_are_not_told_apart(
    tmp_path: Path, capsys: Capture
) -> None:
    for name, seconds in (("vanilla", 1.0), ("pld", 0.97), ("samd", 0.5), ("lookahead", 1.5)):
        _write(tmp_path, name, seconds)
    verdicts = {row["method"]: row["verdict"] for row in _run(capsys, tmp_path)[1]["measured"]}
    assert verdicts["pld"] == "faster", "its interval excludes 1"
    _again(tmp_path, 0.95)
    text, report = _run(capsys, tmp_path, "--out", tmp_path / "out")
    verdicts = {row["method"]: row["verdict"] for row in report["measured"]}
    assert verdicts == {
        **{"pld": "not told apart", "samd": "faster", "lookahead": "slower", "vanilla": None}
    }
    said = "Two runs of Vanilla (autoregressive) differ by [1.05, 1.05]: ratios of up to 1.05x"
    assert f"\n- {said}, either way, are not told apart" in text
    assert "bootstrap-t), widened so that those of all 3 methods hold together in 95% of" in text
    assert "\n- Not told apart from Vanilla (autoregressive): Prompt lookup (PLD)" in text
    floors = [row["exact_speedup_noise_floor_low"] for row in report["measured"]]
    assert floors == pytest.approx([1 / 0.95] * 4)
    for name in ("leaderboard.md", "leaderboard.html", "leaderboard.json"):
        assert said in (tmp_path / "out" / name).read_text(encoding="utf-8"), name
    assert "differ by {[}1.05, 1.05{]}" in (tmp_path / "out" / "leaderboard.tex").read_text()
    assert report["alarms"] == []


def test_the_first_line_says_that_the_machine_was_too_unsteady(
    tmp_path: Path, capsys: Capture
) -> None:
    _write(tmp_path, "vanilla", 1.0, spread=0.5)
    _write(tmp_path, "pld", 0.9)
    _again(tmp_path, 1.0, spread=0.5)
    text, report = _run(capsys, tmp_path, "--out", tmp_path / "out")
    first = text.splitlines()[0]
    assert first.startswith("**The machine was too unsteady for this comparison: two runs of ")
    assert first.endswith(
        "close other programs, repeat with --runs 3 (eval.sh: RUNS=3), or ask more questions**"
    )
    (alarm,) = report["alarms"]
    assert first == f"**{alarm}**"
    page = (tmp_path / "out" / "leaderboard.html").read_text(encoding="utf-8")
    assert page.index(alarm) < page.index("<nav")
    assert "too unsteady" in (tmp_path / "out" / "leaderboard.tex").read_text()


def test_run_i_is_compared_with_run_i(tmp_path: Path, capsys: Capture) -> None:
    for run, seconds in (("1", 1.0), ("2", 2.0)):
        folder = tmp_path / run
        _write(folder, "vanilla", seconds)
        _again(folder, seconds)
        _write(folder, "pld", seconds / 2)
    text, report = _run(capsys, tmp_path / "1", tmp_path / "2")
    assert "differ by [1.00, 1.00]" in text
    assert [row["runs"] for row in report["measured"]] == [2, 2]


def test_options_that_a_run_was_given_do_not_hide_its_second(
    tmp_path: Path, capsys: Capture
) -> None:
    given = {"question_end": 24, "top_p": 0.9}
    _write(tmp_path, "vanilla", 1.0, **given)
    _write(tmp_path, "pld", 0.5, **given)
    _again(tmp_path, 1.0, **given)
    assert "differ by [1.00, 1.00]" in _run(capsys, tmp_path)[0]


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    again = _again(tmp_path, 1.0)
    _write(tmp_path, "pld", 0.5)
    with pytest.raises(
        UserError, match=r"with 0 first runs of the same options .* leave this file out"
    ):
        main([str(tmp_path), "--base", "pld"])
    _write(tmp_path, "vanilla", 1.0)
    with pytest.raises(UserError, match=r"it is a second run \(noise floor\); name the first"):
        main([str(tmp_path), "--base", str(again)])


def test_equal_prompts_that_took_another_time_are_told(tmp_path: Path, capsys: Capture) -> None:
    for name, seconds in (("vanilla", 1.0), ("pld", 2.0)):
        rows = [make_row(1, "qa", [1, 1], 5.0, prompt_tokens=[9], prefill_time=[seconds])]
        write_answers(tmp_path / f"{name}.jsonl", rows, META | {"method": name})
    assert main([str(tmp_path), "--no-published"]) == 0
    out, err = capsys.readouterr()
    line = "Reading the same 1 prompts took 1 s in vanilla.jsonl, but 2 s in pld.jsonl (2.00x)"
    assert err.startswith(f"WARNING: {line}")
    assert f"\n- {line}" in out


def test_files_of_one_interleaved_run_are_not_suspected(tmp_path: Path, capsys: Capture) -> None:
    for name, seconds, run in (("vanilla", 1.0, "a"), ("pld", 2.0, "a"), ("samd", 2.0, "b")):
        rows = [make_row(1, "qa", [1, 1], 5.0, prompt_tokens=[9], prefill_time=[seconds])]
        meta = META | {"method": name, "interleaved_run": run}
        write_answers(tmp_path / f"{name}.jsonl", rows, meta)
    assert main([str(tmp_path), "--no-published"]) == 0
    err = capsys.readouterr().err
    assert err.count("WARNING") == 1 and "samd.jsonl" in err and "pld.jsonl" not in err
    one, other = (str(tmp_path / f"{name}.jsonl") for name in ("pld", "vanilla"))
    assert speed.main(["--file-path", one, "--base-path", other]) == 0
    assert "WARNING" not in capsys.readouterr().err


def test_cpu_time_has_columns_where_it_was_counted(tmp_path: Path, capsys: Capture) -> None:
    for name, cpu in (("vanilla", 4.0), ("pld", 3.0)):
        rows = [make_row(1, "qa", [1, 1], 5.0, cpu_time=[cpu])]
        write_answers(tmp_path / f"{name}.jsonl", rows, META | {"method": name})
    text, report = _run(capsys, tmp_path)
    assert "| CPU ms / token | CPU / Vanilla (autoregressive) |" in text
    assert "|        1500.00 |                          0.75x |" in text
    assert {row["method"]: row["cpu_ratio"] for row in report["measured"]} == {
        **{"pld": 0.75, "vanilla": 1.0}
    }
