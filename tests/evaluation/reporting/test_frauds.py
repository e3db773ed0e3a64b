"""Frauds and accidents that a report must name: each is planted, and told in every format.

Run: pytest tests/evaluation/reporting/test_frauds.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.leaderboard import main as leaderboard
from evaluation.speed import main as speed
from tests.evaluation.answers.answer_rows import make_row, write_answers

META = {
    **{"model_path": "tiny", "dtype": "float32", "device": "cpu", "threads": 2},
    **{"max_new_tokens": 16, "temperature": 0.0, "bench_name": "spec_bench"},
    **{"interleaved_run": "one", "git_commit": "0123456789ab"},
}
Capture = pytest.CaptureFixture[str]


def _write(
    folder: Path,
    name: str,
    ratio: float = 1.0,
    accepted: int = 1,
    num_questions: int = 12,
    token: int = 7,
    **meta: Any,
) -> Path:
    """Write answers of 12 tokens a question, at `ratio` times the plain speed, a little more or less."""
    rows = [
        make_row(
            number,
            "qa",
            [accepted] * (12 // accepted),
            (1 + number % 4 / 50) / ratio,
            token_ids=[[token] * 12],
        )
        for number in range(num_questions)
    ]
    name, role = (name, {}) if name != "again" else ("vanilla", {"role": "noise floor"})
    file = folder / f"{name}{'-again' * bool(role)}.jsonl"
    return write_answers(file, rows, META | {"method": name} | role | meta)


def _report(folder: Path, capsys: Capture) -> tuple[dict[str, Any], dict[str, str]]:
    """The report of a folder as JSON, and each format as text."""
    out = folder / "report"
    assert leaderboard([str(folder), "--no-published", "--out", str(out)]) == 0
    capsys.readouterr()
    texts = {file.suffix: file.read_text("utf-8") for file in out.glob("leaderboard.*")}
    return json.loads(texts[".json"]), texts


def _verdicts(report: dict[str, Any]) -> dict[str, str]:
    return {row["method"]: row["verdict"] for row in report["measured"]}


def test_wrong_tokens_are_not_lossless(tmp_path: Path, capsys: Capture) -> None:
    _write(tmp_path, "vanilla")
    _write(tmp_path, "pld", ratio=1.44, accepted=2, token=8)
    _write(tmp_path, "recycling", ratio=1.44, accepted=2)
    report, texts = _report(tmp_path, capsys)
    assert _verdicts(report) == {
        "pld": "not lossless", "recycling": "faster", "vanilla": None
    }  # fmt: skip
    (alarm,) = report["alarms"]
    assert alarm.startswith("Not lossless: Prompt lookup (PLD)") and "12 of 12" in alarm
    assert all("lossless" in text for text in texts.values())
    (row,) = (row for row in report["measured"] if row["method"] == "pld")
    assert (row["compared_answers"], row["other_answers"], row["is_lossless"]) == (12, 12, False)


def test_the_speed_command_says_so_too(tmp_path: Path, capsys: Capture) -> None:
    base = _write(tmp_path, "vanilla")
    wrong = _write(tmp_path, "pld", ratio=1.44, accepted=2, token=8)
    assert speed(["--file-path", str(wrong), "--base-path", str(base), "--json"]) == 0
    shown = capsys.readouterr()
    assert "NOT LOSSLESS: answers other than the baseline's: 12 of 12" in shown.out
    assert "WARNING: not lossless" in shown.err
    assert json.loads(shown.out.splitlines()[-1])["is_lossless"] is False


def test_in_half_precision_differences_are_counted(tmp_path: Path, capsys: Capture) -> None:
    _write(tmp_path, "vanilla", dtype="bfloat16")
    _write(tmp_path, "pld", ratio=1.44, accepted=2, token=8, dtype="bfloat16")
    report, texts = _report(tmp_path, capsys)
    assert _verdicts(report)["pld"] == "faster" and not report["alarms"]
    found = {row["method"]: row["is_lossless"] for row in report["measured"]}
    assert found["pld"] is None, "nobody has judged the differences"
    assert "12 of 12" in texts[".md"]


def test_two_questions_have_neither_interval_nor_verdict(tmp_path: Path, capsys: Capture) -> None:
    for name, ratio in (("vanilla", 1.0), ("pld", 1.2)):
        _write(tmp_path, name, ratio, accepted=2 if ratio > 1 else 1, num_questions=2)
    report, texts = _report(tmp_path, capsys)
    assert _verdicts(report)["pld"] == "no verdict: too few questions"
    assert report["measured"][0]["exact_speedup_low"] is None
    assert report["measured"][0]["exact_speedup"] == pytest.approx(1.2)
    assert "fewer than 5 questions: no interval and no verdict" in texts[".md"]


@pytest.mark.parametrize(("floor", "ratio"), [(0.93, 1.05), (1.07, 0.955)])
def test_a_floor_on_one_side_counts_for_the_other(
    floor: float, ratio: float, tmp_path: Path, capsys: Capture
) -> None:
    _write(tmp_path, "vanilla")
    _write(tmp_path, "again", floor)
    _write(tmp_path, "pld", ratio, accepted=2)
    report, texts = _report(tmp_path, capsys)
    assert _verdicts(report)["pld"] == "not told apart"
    assert f"ratios of up to {max(floor, 1 / floor):.2f}x, either way" in texts[".md"]


def test_a_drifting_machine_gives_no_verdicts(tmp_path: Path, capsys: Capture) -> None:
    _write(tmp_path, "vanilla")
    _write(tmp_path, "again", 1.3)
    _write(tmp_path, "pld", 1.9, accepted=2)
    report, texts = _report(tmp_path, capsys)
    assert _verdicts(report)["pld"] == "no verdict: the machine was too unsteady"
    assert "too unsteady" in report["alarms"][0] and "Faster than" not in texts[".md"]


def test_a_speed_up_above_acceptance_is_an_alarm(tmp_path: Path, capsys: Capture) -> None:
    _write(tmp_path, "vanilla")
    _write(tmp_path, "pld", 5.75, accepted=2)
    _write(tmp_path, "recycling", 1.9, accepted=2)
    report, _ = _report(tmp_path, capsys)
    assert _verdicts(report)["pld"] == "no verdict: faster than acceptance allows"
    assert _verdicts(report)["recycling"] == "faster"
    (alarm,) = report["alarms"]
    assert alarm.startswith("Impossible: Prompt lookup (PLD) is 5.75x") and "2.00 mean" in alarm


def test_what_was_measured_otherwise_is_said_in_the_report(tmp_path: Path, capsys: Capture) -> None:
    _write(tmp_path, "vanilla", warmup=1)
    _write(tmp_path, "pld", 1.5, accepted=2, warmup=3, interleaved_run="two")
    _write(tmp_path, "recycling", 1.5, accepted=2, warmup=1, git_commit="ba9876543210")
    report, texts = _report(tmp_path, capsys)
    notes = "\n".join(report["notes"])
    assert "Not measured in turn with Vanilla (autoregressive)" in notes
    assert "Measured with different commits (0123456789ab: " in notes
    assert "Measured with different numbers of warm-up questions (1: " in notes
    assert "Not measured in turn" in texts[".md"] and "Not measured in turn" in texts[".html"]


def test_methods_are_compared_with_each_other_too(tmp_path: Path, capsys: Capture) -> None:
    _write(tmp_path, "vanilla")
    _write(tmp_path, "pld", 1.5, accepted=2)
    _write(tmp_path, "recycling", 1.9, accepted=2)
    report, texts = _report(tmp_path, capsys)
    (first,) = report["pairs"]
    assert (first["Models"], first["Over"]) == ("Token Recycling", "Prompt lookup (PLD)")
    assert first["Speed-up"] == pytest.approx(1.9 / 1.5) and first["Verdict"] == "faster"
    assert "Each method over the next one" in texts[".md"]
    questions = (tmp_path / "report" / "questions.csv").read_text().splitlines()
    assert len(questions) == 1 + 3 * 12 and "base_seconds" in questions[0]


def test_a_pair_may_be_further_apart_than_acceptance(tmp_path: Path, capsys: Capture) -> None:
    _write(tmp_path, "vanilla")
    _write(tmp_path, "pld", 1.2, accepted=2)
    _write(tmp_path, "recycling", 0.6, accepted=4)  # large trees, dear steps
    report, _ = _report(tmp_path, capsys)
    (pair,) = report["pairs"]
    assert (pair["Models"], pair["Verdict"]) == ("Prompt lookup (PLD)", "faster")
    assert not report["alarms"]


@pytest.mark.parametrize(
    ("fraud", "verdict"),
    [
        ({"ratio": 5.75}, "no verdict: faster than acceptance allows"),
        ({"ratio": 1.9, "token": 8}, "not lossless"),
    ],
)
def test_what_is_no_speed_up_over_plain_decoding_is_none_over_a_method(
    fraud: dict[str, Any], verdict: str, tmp_path: Path, capsys: Capture
) -> None:
    _write(tmp_path, "vanilla")
    _write(tmp_path, "recycling", **fraud, accepted=2)
    _write(tmp_path, "pld", 1.2, accepted=2, token=fraud.get("token", 7))
    report, _ = _report(tmp_path, capsys)
    (pair,) = report["pairs"]
    assert (pair["Models"], pair["Verdict"]) == ("Token Recycling", verdict)
