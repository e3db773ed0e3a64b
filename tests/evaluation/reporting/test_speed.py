"""The speed command: table, JSON, runs, warnings, and one line for each mistake.

Run: pytest tests/evaluation/reporting/test_speed.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evaluation.leaderboard import main as leaderboard
from evaluation.speed import main as speed
from model.commands import model_options
from model.commands.command_line import UserError
from tests.evaluation.answers.answer_rows import failed_row, make_row, write_answers

ROOT = Path(__file__).resolve().parents[3]
META = {
    "model_path": "tiny",
    "dtype": "float32",
    "device": "cpu",
    "threads": 2,
    "max_new_tokens": 8,
}
TITLES = ("Task", "Questions")
TOO_FEW = "Intervals: fewer than 5 questions: no interval and no verdict"
DECODE_TITLES = ("Decode tokens/s", "Decode speed-up", "95%", "Break-even MAT")
Capture = pytest.CaptureFixture[str]


def main(words: list[str]) -> int:
    """Run the command, with JSON in its last line."""
    return speed([*words, "--json"])


def _cells(table: str) -> list[list[str]]:
    """The cells of a Markdown table, its rule left out."""
    header, _, *rows = table.splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (header, *rows)]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """A method's and a baseline's answers to two questions; speed-ups of 3x and 2x."""
    rows = [make_row(1, "writing", [3, 2, 1], 1.0), make_row(2, "rag", [4], 1.0)]
    base_rows = [make_row(1, "writing", [1] * 6, 3.0), make_row(2, "rag", [1] * 4, 2.0)]
    path = write_answers(tmp_path / "pld.jsonl", rows, META)
    return str(path), str(write_answers(tmp_path / "vanilla.jsonl", base_rows, META))


def _report(capsys: Capture) -> tuple[list[str], dict[str, Any], str]:
    """The printed lines but the last, the last as JSON, and stderr."""
    out, err = capsys.readouterr()
    *lines, last = out.splitlines()
    return lines, json.loads(last), err


def test_table_and_json(pair: tuple[str, str], capsys: Capture) -> None:
    assert main(["--file-path", pair[0], "--base-path", pair[1]]) == 0
    lines, report, err = _report(capsys)
    equality, _, legacy, _, exact, note = "\n".join(lines).split("\n\n")
    assert equality == "Answers other than the baseline's: 0 of 2 (texts of 2, which lack tokens)"
    assert note == TOO_FEW
    assert _cells(legacy) == [
        [*TITLES, "#Mean accepted tokens", "Tokens/s", "Baseline tokens/s", "Speed-up", "95%"],
        ["Multi-turn Conversation", "1", "2.00", "6.00", "2.00", "3.00x", "-"],
        ["RAG", "1", "4.00", "4.00", "2.00", "2.00x", "-"],
        ["Overall", "2", "2.50", "5.00", "2.00", "2.50x", "-"],
    ]
    assert _cells(exact) == [
        [*TITLES, "MAT", "Tokens/s", "Baseline tokens/s", "Speed-up", "95%", *DECODE_TITLES],
        ["Multi-turn Conversation", "1", "2.00", "6.00", "2.00", "3.00x", "-", "-", "-", "-", "-"],
        ["RAG", "1", "4.00", "4.00", "2.00", "2.00x", "-", "-", "-", "-", "-"],
        ["Overall", "2", "2.50", "5.00", "2.00", "2.50x", "-", "-", "-", "-", "-"],
    ]
    overall = report["tasks"]["overall"]
    expected = {"questions": 2, "left_out": 0, "rows": 2, "speedup": 2.5, "decode_speedup": None}
    assert {name: overall[name] for name in expected} == expected
    assert overall["speedup_interval"] == [None, None] and not overall["speedup_is_different"]
    assert overall["decode_speedup_interval"] == [None, None]
    assert report["runs"] == 1 and report["baseline_tokens"] == "counted"
    assert err == ""


def test_left_out_questions_are_counted(
    tmp_path: Path, pair: tuple[str, str], capsys: Capture
) -> None:
    rows = [make_row(1, "writing", [3, 2, 1], 1.0), failed_row(2, "rag")]
    path = str(write_answers(tmp_path / "cut.jsonl", rows))
    assert main(["--file_path", path, "--base_path", pair[1]]) == 0
    lines, report, _ = _report(capsys)
    assert lines[-2] == f"1 of 2 questions are left out: 1 failed in {path}"
    assert report["notes"] == lines[-2:] and lines[-1] == TOO_FEW
    assert report["tasks"]["rag"]["exact_speedup"] is None


def test_rows_with_defects_are_never_used_unsaid(
    tmp_path: Path, pair: tuple[str, str], capsys: Capture
) -> None:
    rows = [make_row(1, "writing", [3, 2, 1], 1.0), make_row(2, "rag", [4], 1.0, ["ERROR"])]
    path = str(write_answers(tmp_path / "errors.jsonl", rows))
    assert main(["--file-path", path, "--base-path", pair[1]]) == 0
    _, report, _ = _report(capsys)
    assert report["notes"] == [
        f"1 of 2 rows in {path} have a defect, and legacy figures include them; "
        "python -m evaluation.defects lists them",
        f"1 of 2 questions are left out: 1 with a defect in {path}",
        TOO_FEW,
    ]
    overall = report["tasks"]["overall"]
    assert (overall["rows"], overall["questions"]) == (2, 1)
    assert (overall["speedup"], overall["exact_speedup"]) == (2.5, 3.0)


@pytest.mark.parametrize(
    ("given", "in_sidecar", "counted"), [([], 8, 8), (["--max-new-tokens", "6"], 8, 6), ([], 0, 20)]
)
def test_exact_figures_count_no_tokens_past_the_limit(
    tmp_path: Path, capsys: Capture, given: list[str], in_sidecar: int, counted: int
) -> None:
    meta = META | {"max_new_tokens": in_sidecar or None}
    path = write_answers(tmp_path / "past.jsonl", [make_row(1, "rag", [5] * 4, 1.0)], meta)
    base = write_answers(tmp_path / "base.jsonl", [make_row(1, "rag", [1] * 4, 1.0)], META)
    assert main(["--file-path", str(path), "--base-path", str(base), *given]) == 0
    _, report, _ = _report(capsys)
    assert report["tasks"]["rag"]["exact_tokens_per_second"] == counted


def test_one_ruler_and_how_drafting_went(
    tmp_path: Path, pair: tuple[str, str], capsys: Capture
) -> None:
    times = {"draft": 0.1, "forward": 0.7, "verify": 0.1, "keep": 0.0, "observe": 0.1}
    counts = {"drafted": [[[3, 1], [2]]], "accepted": [[[2, 0], [1]]], "step_times": [times]}
    row = make_row(1, "writing", [3, 2, 1], 1.0, **counts, sources=[{"suffix": [4, 1]}])
    path = str(write_answers(tmp_path / "counted.jsonl", [row]))
    words = ["--file-path", path, "--base-path", pair[1], "--drafting", "--ruler"]
    assert main([*words, "exact"]) == 0
    lines, report, _ = _report(capsys)
    text = "\n".join(lines)
    assert "Exact ruler" in text and "Legacy ruler" not in text
    assert "50.0% of drafted nodes accepted; time of a step: draft 10.0%, forward 70.0%" in text
    assert report["drafting"]["depth"] == [
        {"depth": 1, "drafted": 4, "accepted": 2},
        {"depth": 2, "drafted": 2, "accepted": 1},
    ]
    assert "| suffix |       4 |        1 | 25.0% |" in lines
    assert main([*words, "legacy"]) == 0
    assert "Exact ruler" not in capsys.readouterr().out
    assert main(["--file-path", pair[0], "--base-path", pair[1], "--drafting"]) == 0
    assert "the answers have no counts of it" in capsys.readouterr().out


def test_several_runs(tmp_path: Path, capsys: Capture) -> None:
    files: dict[str, list[str]] = {"method": [], "base": []}
    for run, seconds in enumerate((1.0, 2.0, 4.0)):
        for name, time in (("method", seconds), ("base", 4.0)):
            row = make_row(1, "qa", [4], time)
            files[name].append(str(write_answers(tmp_path / f"run_{run}/{name}.jsonl", [row])))
    assert main(["--file-path", *files["method"], "--base-path", *files["base"]]) == 0
    lines, report, _ = _report(capsys)
    assert sum("2.33x ±1.53" in line for line in lines) == 4, "both rulers, task and overall"
    assert report["runs"] == 3
    assert report["tasks"]["qa"]["speedup"] == pytest.approx(7 / 3)
    assert report["tasks"]["qa"]["speedup_std"] == pytest.approx((7 / 3) ** 0.5)


@pytest.mark.parametrize("key", ["model_path", "device", "dtype", "threads", "max_new_tokens"])
def test_differing_conditions_are_said_loudly(tmp_path: Path, key: str, capsys: Capture) -> None:
    path, base = (tmp_path / name for name in ("a.jsonl", "b.jsonl"))
    write_answers(path, [make_row(1, "qa", [4], 2.4)], META | {key: "other"})
    write_answers(base, [make_row(1, "qa", [4], 2.5)], META)
    assert main(["--file-path", str(path), "--base-path", str(base)]) == 0
    _, report, err = _report(capsys)
    assert err.startswith("WARNING: not measured under the same conditions: ")
    assert f"{key} is 'other' in {path} but {META[key]!r} in {base}" in err
    assert err.count("\n") == 1 and len(report["warnings"]) == 1


def test_tokenizer_counts_the_baseline(
    tmp_path: Path, pair: tuple[str, str], capsys: Capture
) -> None:
    _save_word_tokenizer(tmp_path / "tokenizer")
    words = ["--file-path", pair[0], "--base-path", pair[1]]
    assert main([*words, "--tokenizer-path", str(tmp_path / "tokenizer")]) == 0
    _, report, _ = _report(capsys)
    # "text of 2 tokens" is four words, minus one, over 3 s and 2 s.
    assert report["tasks"]["overall"]["base_tokens_per_second"] == pytest.approx(
        (3 / 3 + 3 / 2) / 2
    )
    assert report["baseline_tokens"] == "retokenised"


def test_the_tokenizer_of_a_downloaded_model_has_its_short_name(
    tmp_path: Path, pair: tuple[str, str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--file-path", pair[0], "--base-path", pair[1], "--tokenizer-path", "smollm2-135m"]
    monkeypatch.setattr(model_options, "MODELS_FOLDER", tmp_path / "models")
    with pytest.raises(UserError, match=r"run: python -m scripts\.download_model smollm2-135m"):
        main(words)
    _save_word_tokenizer(tmp_path / "models" / "smollm2-135m")
    assert main(words) == 0
    assert _report(capsys)[1]["baseline_tokens"] == "retokenised"


def test_the_leaderboard_counts_the_baseline_likewise(
    tmp_path: Path, pair: tuple[str, str], capsys: Capture
) -> None:
    for path in map(Path, pair):
        path.with_suffix(".meta.json").write_text(json.dumps(META | {"method": path.stem}))
    tokenizer = ["--tokenizer-path", str(tmp_path / "tokenizer")]
    _save_word_tokenizer(tmp_path / "tokenizer")
    assert main(["--file-path", pair[0], "--base-path", pair[1], *tokenizer]) == 0
    expected = _report(capsys)[1]["tasks"]["overall"]["speedup"]
    assert leaderboard([*pair, "--base", pair[1], "--json", "-", *tokenizer]) == 0
    lines, report, _ = _report(capsys)
    method, base = report["measured"]
    assert method["overall"] == pytest.approx(expected) != 2.5
    assert base["overall"] == 1, "the baseline is measured against itself"
    assert "Speed-up over Vanilla (autoregressive), as Spec-Bench counts" in lines
    assert leaderboard([*pair, "--base", pair[1]]) == 0
    assert "as Spec-Bench counts, by counted tokens\n" in capsys.readouterr().out


def _save_word_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"some": 0, "text": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def test_mistakes_are_one_line(tmp_path: Path, pair: tuple[str, str]) -> None:
    path, base = pair
    empty = tmp_path / "no_tokenizer"
    empty.mkdir()
    for words, complaint in (
        (["--file-path", path, base, "--base-path", base], "names 2 runs and --base-path 1"),
        (["--file-path", path, path, "--base-path", base, base], "names a file twice"),
        (["--file-path", "none.jsonl", "--base-path", base], "no answer file none.jsonl"),
        (["--file-path", path, "--base-path", str(tmp_path)], "cannot read the answer file"),
        (
            ["--file-path", path, "--base-path", base, "--tokenizer-path", str(empty)],
            "no tokenizer at",
        ),
        (
            ["--file-path", path, "--base-path", base, "--tokenizer-path", "t", "--ruler", "exact"],
            "--tokenizer-path: got it with --ruler exact",
        ),
        (
            ["--file-path", path, "--base-path", base, "--max-new-tokens", "0"],
            "--max-new-tokens: got 0; allowed: 1 or more",
        ),
    ):
        with pytest.raises(UserError, match=complaint) as caught:
            main(words)
        assert "\n" not in str(caught.value)


def test_exit_codes(pair: tuple[str, str]) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "ignore", "-m", "evaluation.speed", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    good = run("--file-path", pair[0], "--base-path", pair[1])
    assert (good.returncode, good.stderr) == (0, "")
    bad = run("--file-path", "none.jsonl", "--base-path", pair[1])
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
    assert bad.stderr.startswith("error: no answer file none.jsonl")


def test_equal_prompts_that_took_another_time_are_told(tmp_path: Path, capsys: Capture) -> None:
    files = []
    for name, seconds in (("pld", 2.0), ("vanilla", 1.0)):
        rows = [
            make_row(
                1, "rag", [1, 1], 5.0, prompt_tokens=[9], prefill_time=[seconds], cpu_time=[seconds]
            )
        ]
        files.append(str(write_answers(tmp_path / f"{name}.jsonl", rows, META)))
    assert main(["--file-path", files[0], "--base-path", files[1]]) == 0
    lines, report, err = _report(capsys)
    said = f"Reading the same 1 prompts took 1 s in {files[1]}, but 2 s in {files[0]} (2.00x): "
    assert err.startswith(f"WARNING: {said}") and err.count("\n") == 1
    assert report["warnings"] == report["notes"][:1] and report["notes"][0].startswith(said)
    assert lines[-2:] == report["notes"]
    overall = report["tasks"]["overall"]
    names = ("cpu_ms_per_token", "base_cpu_ms_per_token", "cpu_ratio")
    assert [overall[name] for name in names] == [1000, 500, 2]
    header = next(line for line in lines if "Break-even MAT" in line)
    assert header.endswith("| CPU ms / token | Baseline CPU ms / token | CPU ratio |")
