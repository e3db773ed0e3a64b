"""Each identity of honest runs, broken alone: it is named by every report, and no verdict stands beside it.

Run: pytest tests/evaluation/scoring/test_ledger.py
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from evaluation.leaderboard import main as leaderboard
from evaluation.scoring import comparable
from evaluation.scoring.figures import RunFigures
from evaluation.scoring.groups import Broken
from evaluation.scoring.intervals import SpeedVerdict
from evaluation.scoring.ledger import broken_identities
from evaluation.speed import main as speed
from tests.evaluation.answers.answer_rows import Row, write_answers

START = 1_700_000_000.0
META: dict[str, Any] = {
    **{"model_path": "tiny", "dtype": "float32", "device": "cpu", "threads": 2},
    **{"max_new_tokens": 16, "temperature": 0.0, "bench_name": "spec_bench"},
    **{"interleaved_run": "one", "start_time": START, "end_time": START + 100, "num_rows": 24},
}
Capture = pytest.CaptureFixture[str]
Files = dict[str, tuple[list[Row], dict[str, Any]]]


def _file(
    method: str, ratio: float, accepted: int, **meta: Any
) -> tuple[list[Row], dict[str, Any]]:
    """Return 24 honest answers of 12 tokens, 12 in each of two tasks, at `ratio` times the plain decoding speed."""
    rows: list[Row] = []
    for number in range(24):
        prefill, decoding = 0.1 + number / 1000, (1 + number % 4 / 50) / ratio
        choice = {
            **{"index": 0, "turns": [f"text {number}"], "token_ids": [[number + 7] * 12]},
            **{"decoding_steps": [12 // accepted], "new_tokens": [12]},
            **{"accept_lengths": [accepted] * (12 // accepted), "prompt_tokens": [30]},
            **{"wall_time": [prefill + decoding], "prefill_time": [prefill]},
            "decode_time": [decoding],
        }
        row = {
            **{"question_id": number, "category": "qa" if number < 12 else "rag"},
            **{"model_id": method, "choices": [choice], "tstamp": START + 4 * number},
        }
        rows.append(row)
    return rows, META | {"method": method} | meta


def honest() -> Files:
    """Return files of an honest run of three methods, and of vanilla's second run."""
    return {
        "vanilla": _file("vanilla", 1.0, 1),
        "again": _file("vanilla", 1.01, 1, role="noise floor"),
        "pld": _file("pld", 1.6, 2),
        "recycling": _file("recycling", 1.5, 2),
    }


def _choice(files: Files, name: str, number: int) -> dict[str, Any]:
    choice: dict[str, Any] = files[name][0][number]["choices"][0]
    return choice


def _set_times(files: Files, name: str, numbers: range, factor: float) -> None:
    for number in numbers:
        choice = _choice(files, name, number)
        for key in ("wall_time", "prefill_time", "decode_time"):
            choice[key] = [factor * choice[key][0]]


def _only_wall_halved(files: Files) -> None:
    for number in range(24):
        choice = _choice(files, "pld", number)
        choice["wall_time"] = [choice["wall_time"][0] / 2]


def _repeated(files: Files) -> None:
    rows = files["pld"][0]
    rows += [dict(rows[3]) for _ in range(40)]
    files["pld"][1]["num_rows"] = len(rows)


def _dropped(files: Files) -> None:
    for rows, _ in files.values():
        del rows[:8]


def _dropped_from_one(files: Files) -> None:
    rows, meta = files["pld"]
    del rows[:8]
    meta["num_rows"] = len(rows)


def _drafting_baseline(files: Files) -> None:
    for number in range(24):
        choice = _choice(files, "vanilla", number)
        choice |= {"accept_lengths": [2] * 6, "decoding_steps": [6]}


def _other_counts(files: Files) -> None:
    for number in range(24):
        choice = _choice(files, "pld", number)
        choice |= {"new_tokens": [14], "accept_lengths": [2] * 7, "decoding_steps": [7]}
        for name in files:
            _choice(files, name, number).pop("token_ids", None)


def _copied(files: Files) -> None:
    files["again"] = (files["vanilla"][0], files["again"][1])


def _unread(files: Files) -> None:
    for number in range(24):
        choice = _choice(files, "pld", number)
        choice["wall_time"] = [choice["decode_time"][0] + 0.001]
        choice["prefill_time"] = [0.001]


def _negative_steps(files: Files) -> None:
    choice = _choice(files, "pld", 5)
    choice["decoding_steps"] = [-2]
    del choice["accept_lengths"]


def _meta(**values: Any) -> Callable[[Files], None]:
    return lambda files: files["pld"][1].update(values)


def _future_row(files: Files) -> None:
    files["pld"][0][2]["tstamp"] = time.time() + 10**6


def _interrupted(files: Files) -> None:
    """Both runs of the baseline had their turn, and the methods had not."""
    for rows, meta in files.values():
        meta |= {"end_time": None, "num_rows": None}
        del rows[16:]
    del files["pld"][0][15], files["recycling"][0][15]


def _failed(files: Files) -> None:
    """Questions failed that are slow in all files: the point has them in its baseline, the interval has not."""
    for number in range(0, 24, 3):
        for name in files:
            _set_times(files, name, range(number, number + 1), 3)
        files["pld"][0][number] |= {"choices": [], "error": "out of memory"}


def _doubled_usage(files: Files) -> None:
    """A server with other texts, so that no equal text shows it, says twice as many tokens."""
    for number in range(24):
        choice = _choice(files, "pld", number)
        choice |= {"turns": [f"word {number}"], "new_tokens": [24], "decoding_steps": [12]}
        choice |= {"accept_lengths": [2] * 12}
        del choice["token_ids"]


# What is planted, a part of the line that names it, and whose verdicts are gone.
ALL = ("pld", "recycling")
PLANTS: dict[str, tuple[Callable[[Files], None], str, tuple[str, ...]]] = {
    "wall times below their parts": (_only_wall_halved, "24 of 24 rows cannot be", ("pld",)),
    "a row many times": (_repeated, "40 of 64 rows cannot be", ("pld",)),
    "slow rows dropped from all files": (_dropped, "has 16 rows, its run had 24", ALL),
    "slow rows dropped from one file": (
        _dropped_from_one,
        "8 questions have a row in one",
        ("pld",),
    ),
    "a baseline that drafts": (_drafting_baseline, "it is not plain decoding", ALL),
    "equal texts of other counts": (_other_counts, "24 equal texts have other numbers", ("pld",)),
    "usage that is not of its texts": (
        _doubled_usage,
        "has 2.00 times as many tokens a character",
        (),  # "not lossless" comes first
    ),
    "a floor that is a copy": (_copied, "one is a copy of the other", ALL),
    "prompts that were not read": (_unread, "they were not read", ("pld",)),
    "steps below one": (_negative_steps, "turn 0 has 12 new tokens in -2 steps", ("pld",)),
    "milliseconds for seconds": (
        lambda files: _set_times(files, "pld", range(24), 1000),
        "its run 100 s",
        ("pld",),
    ),
    "times of nearly nothing": (
        lambda files: _set_times(files, "pld", range(24), 1e-9),
        "Impossible: ",
        ("pld",),
    ),
    "halved times in one task": (
        lambda files: _set_times(files, "pld", range(12), 0.5),
        "in qa with 2.00 mean accepted tokens",
        ("pld",),
    ),
    "a negative time": (
        lambda files: _choice(files, "pld", 5).update(prefill_time=[1.2], decode_time=[-0.3]),
        "1 of 24 rows cannot be",
        ("pld",),
    ),
    "a row of the future": (_future_row, "was written in the future", ("pld",)),
    "a row after the end": (
        lambda files: files["pld"][0][2].update(tstamp=START + 500),
        "1 of 24 rows were written before its run began or after it ended",
        ("pld",),
    ),
    "an end before the beginning": (
        _meta(end_time=START - 5),
        "its run ended -5 s after",
        ("pld",),
    ),
    "an end in the future": (_meta(end_time=4e9), "or in the future", ("pld",)),
}


# Of honest runs: what happened, a part of the line, and whose verdicts are gone.
HONEST: dict[str, tuple[Callable[[Files], None], str, tuple[str, ...]]] = {
    "an interrupted run": (_interrupted, "1 questions have a row in one", ALL),
    "slow questions failed": (_failed, "outside its own interval, without", ("pld",)),
    "slow rows dropped from one file": PLANTS["slow rows dropped from one file"],
}


def _write(folder: Path, files: Files) -> dict[str, Path]:
    return {
        name: write_answers(folder / f"{name}.jsonl", rows, meta)
        for name, (rows, meta) in files.items()
    }


def _report(folder: Path, capsys: Capture) -> dict[str, Any]:
    assert leaderboard([str(folder), "--no-published", "--json", str(folder / "board.json")]) == 0
    capsys.readouterr()
    report: dict[str, Any] = json.loads((folder / "board.json").read_text("utf-8"))
    return report


def test_an_honest_run_breaks_none(tmp_path: Path, capsys: Capture) -> None:
    paths = _write(tmp_path, honest())
    report = _report(tmp_path, capsys)
    assert report["alarms"] == []
    verdicts = {row["method"]: row["verdict"] for row in report["measured"]}
    assert verdicts == {"vanilla": None, "pld": "faster", "recycling": "faster"}
    assert speed(["--file-path", str(paths["pld"]), "--base-path", str(paths["vanilla"])]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", PLANTS)
def test_a_broken_identity_is_named_and_no_verdict_stands_beside_it(
    name: str, tmp_path: Path, capsys: Capture
) -> None:
    plant, named, of = PLANTS[name]
    files = honest()
    plant(files)
    paths = _write(tmp_path, files)
    report = _report(tmp_path, capsys)
    assert any(named in line for line in report["alarms"]), report["alarms"]
    verdicts = {row["method"]: row["verdict"] for row in report["measured"]}
    assert {method for method in ALL if verdicts[method].startswith("no verdict")} == set(of)
    method = "again" if name == "a floor that is a copy" else "pld"
    words = ["--file-path", str(paths[method]), "--base-path", str(paths["vanilla"])]
    assert speed(words) == 0
    shown = capsys.readouterr()
    assert named in shown.out and "WARNING: " in shown.err and named in shown.err


@pytest.mark.parametrize("name", HONEST)
def test_what_may_befall_an_honest_run_has_a_word_of_its_own(
    name: str, tmp_path: Path, capsys: Capture
) -> None:
    plant, named, of = HONEST[name]
    files = honest()
    plant(files)
    _write(tmp_path, files)
    report = _report(tmp_path, capsys)
    assert any(named in line for line in report["alarms"]), report["alarms"]
    assert all(line.startswith("Not of the same questions: ") for line in report["alarms"])
    verdicts = {row["method"]: row["verdict"] for row in report["measured"]}
    without = {method for method in ALL if verdicts[method] == SpeedVerdict.PARTIAL.value}
    assert without == set(of), verdicts


def test_the_ledger_is_read_once_for_each_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[str] = []

    def counted(pairs: Any, figures: RunFigures) -> list[Broken]:
        held.append(pairs[0][0].path.stem)
        return broken_identities(pairs, figures)

    monkeypatch.setattr(comparable, "broken_identities", counted)
    assert leaderboard([str(path) for path in _write(tmp_path, honest()).values()]) == 0
    assert sorted(held) == ["again", "pld", "recycling", "vanilla"]


def test_a_run_that_goes_on_breaks_nothing_by_itself(tmp_path: Path, capsys: Capture) -> None:
    files = honest()
    for rows, meta in files.values():
        del meta["num_rows"], rows[-1]
        meta["end_time"] = None
    _write(tmp_path, files)
    assert _report(tmp_path, capsys)["alarms"] == []


def test_a_server_that_remembers_its_answers_is_named(tmp_path: Path, capsys: Capture) -> None:
    files = honest()
    files["pld"][1]["is_served"] = True
    for name in ("vanilla", "recycling"):  # a second run of all
        files[f"{name}2"] = deepcopy(files[name])
        _set_times(files, f"{name}2", range(24), 1.01)
    files["pld2"] = _file("pld", 40, 2, is_served=True)
    _write(tmp_path, files)
    report = _report(tmp_path, capsys)
    said = "pld2.jsonl took 0.04 of the seconds of pld.jsonl: the server remembers answers"
    assert any(said in line for line in report["alarms"]), report["alarms"]
    verdicts = {row["method"]: row["verdict"] for row in report["measured"]}
    assert verdicts["pld"].startswith("no verdict") and verdicts["recycling"] == "faster"
