"""The leaderboard: golden tables for a small set of files, grouping, runs, published rows, mistakes.

Run: pytest tests/evaluation/reporting/test_leaderboard.py
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from evaluation.leaderboard import FILES, PUBLISHED_HEADING, main
from evaluation.reporting import tables
from evaluation.reporting.published import COLUMNS, PUBLISHED_DIR, read_published
from model.commands.command_line import UserError
from tests.evaluation.answers.answer_rows import failed_row, make_row, write_answers

ROOT = Path(__file__).resolve().parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
META = {
    **{"model_path": "somewhere/models/tiny", "dtype": "float32", "device": "cpu", "threads": 2},
    **{"max_new_tokens": 16, "temperature": 0.0, "bench_name": "spec_bench", "git_commit": COMMIT},
}
Capture = pytest.CaptureFixture[str]

CAPTION = "tiny; Spec-Bench; greedy, at most 16 new tokens a turn; float32; cpu, 2 threads; "
GOLDEN = f"""\
{CAPTION}commit 0123456789ab

Speed-up over Vanilla (autoregressive), as Spec-Bench counts, by counted tokens

| Models                   | Multi-turn Conversation (n=5) | Translation | Summarization | QA (n=5) | Math Reasoning | RAG | Code (n=1) | #Mean accepted tokens |            Overall | Tokens/s |
| ------------------------ | ----------------------------: | ----------: | ------------: | -------: | -------------: | --: | ---------: | --------------------: | -----------------: | -------: |
| Token Recycling          |                         3.00x |           - |             - |    4.00x |              - |   - |          - |                  4.00 | 3.50x [3.13, 3.91] |    14.00 |
| Prompt lookup (PLD)      |                         1.50x |           - |             - |    2.00x |              - |   - |      1.20x |                  2.00 | 1.75x [1.57, 1.96] |     7.00 |
| Vanilla (autoregressive) |                         1.00x |           - |             - |    1.00x |              - |   - |      1.00x |                  1.00 |              1.00x |     4.00 |

Exact figures over Vanilla (autoregressive): every token weighs the same; MAT is tokens a step, every step counted

| Models                   |           Speed-up | Tokens/s |  MAT | Other answers |
| ------------------------ | -----------------: | -------: | ---: | ------------: |
| Token Recycling          | 3.43x [3.07, 3.83] |    13.71 | 4.00 |       0 of 10 |
| Prompt lookup (PLD)      | 1.71x [1.53, 1.92] |     6.86 | 2.00 |       0 of 11 |
| Vanilla (autoregressive) |              1.00x |     4.00 | 1.00 |             - |

Each method over the next one

| Models          | Over                | Verdict |           Speed-up |
| --------------- | ------------------- | ------- | -----------------: |
| Token Recycling | Prompt lookup (PLD) | faster  | 2.00x [2.00, 2.00] |

- In brackets: paired intervals over questions (symmetric bootstrap-t), widened so that those of all 2 methods hold together in 95% of comparisons (Bonferroni)
- Faster than Vanilla (autoregressive) (the interval of the exact speed-up lies beyond 1): Token Recycling, Prompt lookup (PLD)
- Not measured in turn with Vanilla (autoregressive), so that a slower minute of the machine is in the ratio: Token Recycling, Prompt lookup (PLD)
"""  # noqa: E501


def _write(
    folder: Path,
    name: str,
    speeds: dict[str, float],
    accepted: int | None = None,
    copies: int = 1,
    **meta: Any,
) -> Path:
    """Write answers of 12 tokens a question with the given tokens/s for each category."""
    accepted = accepted or (1 if name == "vanilla" else 6)
    rows = [
        make_row(question_id, category, [accepted] * (12 // accepted), 12 / speed)
        for question_id, (category, speed) in enumerate([*speeds.items()] * copies, start=1)
    ]
    return write_answers(folder / f"{name}.jsonl", rows, META | {"method": name} | meta)


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """A folder with three methods' Spec-Bench answers and, below it, two methods' MBPP answers."""
    folder = tmp_path / "answers"
    _write(folder, "vanilla", {"writing": 4.0, "qa": 4.0}, copies=5)
    _write(folder, "pld", {"writing": 6.0, "qa": 8.0}, accepted=2, copies=5)
    _write(folder, "recycling", {"writing": 12.0, "qa": 16.0}, accepted=4, copies=5)
    _write(folder / "mbpp", "vanilla", {"code": 5.0}, bench_name="mbpp")
    _write(folder / "mbpp", "pld", {"code": 6.0}, accepted=3, bench_name="mbpp")
    return folder


def _run(capsys: Capture, *words: object) -> tuple[str, dict[str, Any]]:
    """The command's text and its line of JSON."""
    assert main([*map(str, words), "--json", "-"]) == 0
    text, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    return text + "\n", json.loads(last)


def test_golden(answers: Path, capsys: Capture) -> None:
    text, report = _run(capsys, answers, answers / "mbpp", "--no-published")
    assert text == GOLDEN
    assert [row["method"] for row in report["measured"]] == ["recycling", "pld", "vanilla"]
    assert [row["is_baseline"] for row in report["measured"]] == [False, False, True]
    pld = report["measured"][1]
    assert (pld["mt_bench"], pld["code"], pld["overall"]) == pytest.approx((1.5, 1.2, 1.75))
    assert (pld["questions"], pld["rag"], pld["runs"]) == (11, None, 1)
    assert report["published"] == []


def test_the_order_of_arguments_does_not_matter(answers: Path, capsys: Capture) -> None:
    files = sorted(answers.rglob("*.jsonl"))
    for words in ([*files, answers], files[::-1]):
        assert _run(capsys, *words, "--no-published")[0] == GOLDEN


def test_runs_are_averaged_and_options_tell_entries_apart(tmp_path: Path, capsys: Capture) -> None:
    for run, factor in (("run_1", 1.0), ("run_2", 2.0)):
        _write(tmp_path / run, "vanilla", {"qa": 4.0})
        _write(tmp_path / run, "pld", {"qa": 4.0 * factor}, options={"n": 3, "m": 1})
    _write(tmp_path / "wide", "pld", {"qa": 6.0}, options={"n": 5, "m": 1})
    folders = [tmp_path / name for name in ("run_1", "run_2", "wide")]
    text, report = _run(capsys, *folders, "--no-published")
    lines = [line.split("|")[1].strip() for line in text.splitlines()[6:9]]
    assert lines == [
        *("Prompt lookup (PLD) (a)", "Prompt lookup (PLD) (b)", "Vanilla (autoregressive)")
    ]
    assert "1.50x ±0.71" in text
    assert "- Prompt lookup (PLD) (b): n 5, m 1\n" in text
    runs = "2 of Prompt lookup (PLD) (a), 1 of Prompt lookup (PLD) (b), 2 of Vanilla"
    assert f"- ± is the standard deviation over runs: {runs}" in text
    assert report["measured"][0]["overall_std"] == pytest.approx(0.5**0.5)
    assert report["measured"][1]["overall_std"] is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("model_path", "models/other"), ("device", "NVIDIA A100"), ("dtype", "float16")),
        *(("threads", 9), ("max_new_tokens", 9), ("bench_name", "demo")),
        *(("compile", True), ("num_choices", 2), ("num_workers", 2), ("conv_template", "raw")),
        *(("question_file_sha256", "f" * 64), ("sdpa_backends", "flash+math")),
        *(("graphs", "off"), ("machine", "2 cores, avx avx2 fma")),
    ],
)
def test_other_conditions_are_another_group(
    answers: Path, key: str, value: object, capsys: Capture
) -> None:
    lone = _write(answers.parent, "pld", {"writing": 6.0, "qa": 8.0}, **{key: value})
    text, report = _run(capsys, answers, lone, "--no-published")
    (reason,) = report["left_out"]
    assert f"has no baseline 'vanilla' among pld ({lone});" in reason
    assert f"- Left out: {reason}" in text
    assert len(report["measured"]) == 3
    with pytest.raises(UserError, match="has no baseline 'vanilla' among pld"):
        main([str(lone)])
    base = _write(answers.parent, "vanilla", {"writing": 3.0, "qa": 4.0}, **{key: value})
    text, report = _run(capsys, answers, lone, base, "--no-published")
    assert text.count("as Spec-Bench counts, by counted tokens\n") == 2
    captions = [line for line in text.splitlines() if "; greedy, at most " in line]
    assert len(set(captions)) == len(captions) == 2
    assert len(report["measured"]) == 5


def test_code_stands_beside_spec_bench_and_each_question_file_by_itself(
    tmp_path: Path, capsys: Capture
) -> None:
    for folder, speed in (("as-published", 8.0), ("of-mine", 6.0)):
        asked = {"question_file_sha256": folder.ljust(64, "0")}
        _write(tmp_path / folder, "vanilla", {"qa": 4.0}, **asked)
        _write(tmp_path / folder, "pld", {"qa": speed}, **asked)
    code = {"bench_name": "mbpp", "question_file_sha256": "c" * 64}
    for name, speed in (("vanilla", 4.0), ("pld", 5.0)):
        _write(tmp_path / "mbpp", name, {"code": speed}, **code)
    folders = [tmp_path / name for name in ("as-published", "mbpp", "of-mine")]
    text, report = _run(capsys, *folders[:2], "--no-published")
    assert report["measured"][0]["code"] == 1.25
    assert "; a question file of its own (as-published);" in text
    _, report = _run(capsys, folders[0], folders[2], "--no-published")
    rows = {(row["question_file"], row["method"]): row for row in report["measured"]}
    assert rows["as-published", "pld"]["overall"] == 2.0
    assert rows["of-mine00000", "pld"]["overall"] == 1.5
    assert all(row["runs"] == 1 for row in rows.values())


def test_the_baseline_can_be_named(answers: Path, capsys: Capture) -> None:
    _, report = _run(capsys, answers, "--base", "pld")
    assert {row["method"]: row["overall"] for row in report["measured"]} == pytest.approx(
        {"recycling": 2.0, "pld": 1.0, "vanilla": 4 / 7}
    )
    files = [answers / "recycling.jsonl", answers / "vanilla.jsonl"]
    _, report = _run(capsys, *files, "--base", answers / "pld.jsonl")
    assert [row["is_baseline"] for row in report["measured"]] == [False, True, False]


def test_files_without_sidecar_go_by_their_model_id(tmp_path: Path, capsys: Capture) -> None:
    for name, seconds in (("vicuna-vanilla-float16", 2.0), ("vicuna-pld-float16", 1.0)):
        lengths = [1, 1] if "vanilla" in name else [2]
        row = make_row(1, "qa", lengths, seconds) | {"model_id": name}
        write_answers(tmp_path / f"{name}.jsonl", [row])
    text, report = _run(capsys, tmp_path, "--no-published")
    assert text.startswith("unknown model; Spec-Bench; device not recorded\n")
    assert [row["method"] for row in report["measured"]] == [
        *("vicuna-pld-float16", "vicuna-vanilla-float16")
    ]
    assert report["measured"][0]["overall"] == 2.0


def test_left_out_questions_are_told(answers: Path, capsys: Capture) -> None:
    rows = [make_row(1, "writing", [2] * 6, 2.0), failed_row(2, "qa")]
    path = write_answers(answers / "pld.jsonl", rows)
    text, report = _run(capsys, answers, "--no-published")
    assert (
        f"\n- Prompt lookup (PLD): 9 of 10 questions are left out: 1 failed in {path}, 8 missing in"
        in text
    )
    assert [row["left_out"] for row in report["measured"]] == [0, 9, 0]


def test_code_alone_fills_the_overall_columns(answers: Path, capsys: Capture) -> None:
    text, _ = _run(capsys, answers / "mbpp", "--no-published")
    header = [title.strip() for title in text.splitlines()[4].strip("|").split("|")]
    assert header == ["Models", "Code (n=1)", "#Mean accepted tokens", "Overall", "Tokens/s"]
    assert text.splitlines()[6].split("|")[2].strip() == "1.20x"


def test_published_rows_come_below_and_apart(answers: Path, capsys: Capture) -> None:
    text, report = _run(capsys, answers, "--published")
    ours, _, published = text.partition(f"## {PUBLISHED_HEADING}\n")
    assert "Vicuna" not in ours
    assert not [line for line in published.splitlines() if "|" in line and "tiny;" in line]
    assert "A100-80GB, published by: Spec-Bench Leaderboard.md" in published
    assert "A100-80GB, published by: Token Recycling paper, arXiv 2408.08696" in published
    assert "3090, published by: Spec-Bench Leaderboard.md" in published
    devices = {"A100-80GB", "A100-40GB", "3090"}
    assert {row["device"] for row in report["published"]} == devices
    text, report = _run(capsys, answers, "--published-device", "3090")
    assert {row["device"] for row in report["published"]} == {"3090"}


def test_a_sentence_says_why_published_figures_differ(
    answers: Path, tmp_path: Path, capsys: Capture
) -> None:
    words = ("--published-device", "A100-80GB", "--published-model", "Vicuna-7B")
    text, report = _run(capsys, answers, *words, "--out", tmp_path / "out")
    spec_bench, paper = (
        f"Why these differ from ours: they are of Vicuna-7B-v1.3 on A100-80GB ({conditions}), ours "
        f"of ({CAPTION}commit 0123456789ab); what a pass over several tokens costs"
        for conditions in (
            "mean of 3 runs, fp16, greedy, batch size 1, PyTorch 2.5.1, CUDA 11.5, 96 CPU cores",
            "fp16, greedy, batch size 1, PyTorch 2.3, CUDA 12.2",
        )
    )
    assert text.count(spec_bench) == text.count(paper) == 1
    found = {row["source"][:5]: row["differs"] for row in report["published"]}
    assert found["Spec-"].startswith(spec_bench) and found["Token"].startswith(paper)
    for name in ("leaderboard.md", "leaderboard.tex", "leaderboard.csv", "leaderboard.html"):
        written = (tmp_path / "out" / name).read_text(encoding="utf-8")
        assert spec_bench in written and paper in written, name


def test_published_figures_are_those_of_the_files() -> None:
    rows = read_published(PUBLISHED_DIR, ["A100-80gb"])
    assert list(rows.columns) == list(COLUMNS)
    is_recycling = (rows["model"] == "Vicuna-7B-v1.3") & (rows["method"] == "Recycling")
    by_source = rows[is_recycling].set_index("source")["overall"].to_dict()
    assert [by_source[source] for source in sorted(by_source)] == [2.22, 2.03]
    paper = rows[is_recycling & rows["tokens_per_second"].notna()].iloc[0]
    assert (paper["code"], paper["tokens_per_second"]) == (2.34, 110.06)


def test_intervals_tell_methods_from_the_baseline(tmp_path: Path, capsys: Capture) -> None:
    tasks = ("writing", "qa", "rag", "translation")
    _write(tmp_path, "vanilla", dict.fromkeys(tasks, 4.0), copies=2)
    _write(tmp_path, "pld", dict(zip(tasks, (3.0, 5.0, 4.5, 3.5), strict=True)), copies=2)
    _write(tmp_path, "recycling", dict(zip(tasks, (7.0, 8.0, 9.0, 8.0), strict=True)), copies=2)
    text, report = _run(capsys, tmp_path, "--no-published")
    assert "\n- Not told apart from Vanilla (autoregressive): Prompt lookup (PLD)\n" in text
    assert "lies beyond 1): Token Recycling\n" in text
    assert [row["verdict"] for row in report["measured"]] == ["faster", "not told apart", None]
    recycling, pld, _ = report["measured"]
    assert recycling["overall"] == pytest.approx(2.0)
    assert 1.75 <= recycling["overall_low"] < 2.0 < recycling["overall_high"] <= 2.25
    assert pld["exact_speedup_low"] < 1 < pld["exact_speedup_high"]
    assert f"2.00x [{recycling['overall_low']:.2f}, {recycling['overall_high']:.2f}]" in text


def test_steps_are_summed_up_where_they_are_recorded(tmp_path: Path, capsys: Capture) -> None:
    steps = {"drafted": [[[4, 4], [2]]], "accepted": [[[2, 1], [1]]]}
    parts = ("draft", "forward", "verify", "keep", "observe")
    times = dict(zip(parts, (0.5, 3.0, 1.0, 0.25, 0.25), strict=True))
    rows = [
        make_row(
            1, "qa", [3, 3], 6.0, prefill_time=[1.0], decode_time=[5.0], step_times=[times], **steps
        )
    ]
    write_answers(tmp_path / "pld.jsonl", rows, META | {"method": "pld"})
    base = [make_row(1, "qa", [1] * 6, 11.0, prefill_time=[1.0], decode_time=[10.0])]
    write_answers(tmp_path / "vanilla.jsonl", base, META | {"method": "vanilla"})
    pld, vanilla = _run(capsys, tmp_path, "--no-published")[1]["measured"]
    assert pld["acceptance_rate"] == pytest.approx(0.4)
    assert [pld[f"{part}_share"] for part in parts] == pytest.approx([0.1, 0.6, 0.2, 0.05, 0.05])
    assert (pld["decode_speedup"], pld["break_even_mat"]) == pytest.approx((2.0, 1.5))
    assert vanilla["acceptance_rate"] is None


def test_tokens_a_second_stand_beside_the_published_baseline(
    tmp_path: Path, capsys: Capture
) -> None:
    def run(**meta: Any) -> tuple[str, dict[str, Any]]:
        for name, speed in (("vanilla", 54.30), ("pld", 108.60)):
            _write(tmp_path, name, {"qa": speed}, **{"model_path": "lmsys/vicuna-7b-v1.3"} | meta)
        return _run(capsys, tmp_path, "--published")

    text, report = run()
    assert [row["over_published_baseline"] for row in report["measured"]] == pytest.approx([2, 1])
    ours = text.partition(PUBLISHED_HEADING)[0]
    assert "over the 54.30 of plain decoding of Vicuna-7B-v1.3 on A100-80GB as published" in ours
    assert "Prompt lookup (PLD) 108.60 (2.00x), Vanilla (autoregressive) 54.30 (1.00x)" in ours
    for meta in ({"temperature": 0.7}, {"bench_name": "demo"}, {"model_path": "lmsys/vicuna-7b"}):
        text, report = run(**meta)
        assert "over the 54.30" not in text
        assert [row["over_published_baseline"] for row in report["measured"]] == [None, None]


def test_the_columns_of_spec_bench_as_csv(answers: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "table.csv"
    _run(capsys, answers, "--no-published", "--spec-bench-csv", out)
    table = pd.read_csv(out)
    assert list(table.columns) == [
        *("Models", "Multi-turn Conversation", "Translation", "Summarization", "QA"),
        *("Math Reasoning", "RAG", "#Mean accepted tokens", "Overall", "Measured"),
    ]
    assert table["Models"].tolist()[:2] == ["Token Recycling", "Prompt lookup (PLD)"]
    assert table["Overall"].tolist() == [3.5, 1.75, 1.0]
    assert table["Translation"].isna().all()
    assert set(table["Measured"]) == {f"{CAPTION}commit 0123456789ab"}


def test_files_are_written(answers: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "new" / "report"
    text, report = _run(capsys, answers, "--published", "--out", out)
    names = (
        *("leaderboard.csv", "leaderboard.html", "leaderboard.json", "leaderboard.md"),
        *("leaderboard.tex", "questions.csv", "spec-bench.csv"),
    )
    assert tuple(sorted(path.name for path in out.iterdir())) == names
    assert (out / "leaderboard.md").read_text(encoding="utf-8").startswith(text)
    assert json.loads((out / "leaderboard.json").read_text(encoding="utf-8")) == report
    assert (out / "leaderboard.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    csv = (out / "leaderboard.csv").read_text(encoding="utf-8")
    table = pd.read_csv(StringIO(csv))
    assert table["kind"].value_counts().to_dict() == {"published": 63, "measured": 3}
    assert table["overall"].tolist() == [
        row["overall"] for row in report["measured"] + report["published"]
    ]
    assert csv.splitlines()[1].startswith("measured,models/tiny,cpu,")
    lone = tmp_path / "table.csv"
    _run(capsys, answers, "--no-published", "--csv", lone)
    assert len(lone.read_text(encoding="utf-8").splitlines()) == 4


@pytest.mark.parametrize("stderr", [subprocess.PIPE, subprocess.STDOUT])
def test_files_are_written_though_no_one_reads_the_tables(
    stderr: int, answers: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report"
    command = [sys.executable, "-m", "evaluation.leaderboard", str(answers), "--out", str(out)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr) as run:
        assert run.stdout
        run.stdout.close()
        run.wait()
    assert {path.name for path in out.iterdir()} == {file for file, _ in FILES.values()}


def test_mistakes_are_one_line(answers: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "twice").mkdir()
    _write(tmp_path / "twice", "vanilla", {"qa": 1.0}, options={"a": 1})
    write_answers(
        tmp_path / "twice/b.jsonl",
        [make_row(1, "qa", [1], 1.0)],
        META | {"method": "vanilla", "options": {"a": 2}},
    )
    vanilla = answers / "vanilla.jsonl"
    for words, complaint in (
        ([tmp_path / "empty"], "no answer files"),
        (["none.jsonl"], r"no answer file none\.jsonl"),
        (
            [answers, "--base", "medusa"],
            r"has no baseline 'medusa' among pld \(.*pld.jsonl\), rec.* vanilla \(",
        ),
        ([tmp_path / "twice"], r"has 2 baselines: vanilla \(a=1\), vanilla \(a=2\)"),
        ([answers, "--published-device", "H999"], "no published figures for the device 'H999'"),
        ([answers, "--csv", vanilla], "is one of the files to read"),
        ([answers, "--csv", tmp_path / "a", "--json", tmp_path / "a"], "is to be written twice"),
        ([answers, "--out", vanilla], "cannot make the folder"),
        ([answers, "--csv", tmp_path / "none" / "table.csv"], "cannot write"),
    ):
        with pytest.raises(UserError, match=complaint) as caught:
            main([str(word) for word in words])
        assert "\n" not in str(caught.value)


BAD_FILES = {"empty.jsonl": "", "no-json.jsonl": "one\n", "no-answers.jsonl": '{"step": 1}\n'}


def test_a_bad_file_of_a_folder_is_a_line_of_every_format(
    answers: Path, tmp_path: Path, capsys: Capture
) -> None:
    for name, content in BAD_FILES.items():
        (answers / name).write_text(content)
    out = tmp_path / "report"
    assert main([str(answers), "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("WARNING: left out: ") == 3
    assert len(json.loads((out / "leaderboard.json").read_text("utf-8"))["measured"]) == 3
    for file, _ in FILES.values():
        if file in (
            "spec-bench.csv",
            "questions.csv",
        ):  # columns of others, and nothing but questions
            continue
        text = (out / file).read_text(encoding="utf-8")
        assert all(name in text for name in BAD_FILES), f"{file} should name the files left out"
    with pytest.raises(UserError, match=r"empty\.jsonl holds no answers"):
        main([str(answers / "pld.jsonl"), str(answers / "empty.jsonl")])


def test_a_folder_without_any_answers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match=r"empty\.jsonl holds no answers"):
        main([str(tmp_path)])


def test_a_method_that_cannot_be_compared_is_left_out_alone(answers: Path, capsys: Capture) -> None:
    write_answers(
        answers / "texts.jsonl",
        [{"question_id": 1, "category": "writing", "choices": [{"turns": ["some text"]}]}],
        META | {"method": "suffix"},
    )
    bench = _write(answers.parent / "bench", "recycling", {"code": 5.0}, bench_name="mbpp")
    _, report = _run(capsys, answers, bench, "--no-published")
    assert [row["method"] for row in report["measured"]] == ["pld", "vanilla"]
    reasons = report["left_out"]
    assert any("answers to mbpp, which the baseline vanilla lacks" in it for it in reasons)
    assert any("no question has figures in both" in it and "texts.jsonl" in it for it in reasons)


NAMES_OF_COLUMNS = (
    *(
        "model",
        "device",
        "method",
        "runs",
        "questions",
        "commit",
        "verdict",
        "exact_speedup",
        "kind",
    ),
    *(
        "overall",
        "is_lossless",
        "note",
        "source",
        "speed_std",
        "speed",
        "Models",
        "Overall",
        "Code",
    ),
)


def test_categories_of_any_name_overwrite_no_column(tmp_path: Path, capsys: Capture) -> None:
    _write(tmp_path, "vanilla", dict.fromkeys(NAMES_OF_COLUMNS, 2.0))
    _write(tmp_path, "pld", dict.fromkeys(NAMES_OF_COLUMNS, 6.0), accepted=2)
    text, report = _run(capsys, tmp_path, "--out", tmp_path / "report")
    pld, vanilla = report["measured"]
    for row, method, speedup in ((pld, "pld", 3.0), (vanilla, "vanilla", 1.0)):
        assert (row["model"], row["device"], row["method"]) == ("models/tiny", "cpu", method)
        assert (row["runs"], row["questions"]) == (1, len(NAMES_OF_COLUMNS))
        assert row["overall"] == row["exact_speedup"] == row["overall (category)"] == speedup
        for name in NAMES_OF_COLUMNS:
            if name != "overall":
                assert speedup in (row.get(name), row.get(f"task {name}")), name
    table = pd.read_csv(tmp_path / "report" / "leaderboard.csv")
    assert table["kind"].tolist()[:2] == ["measured"] * 2
    assert table["task kind"].tolist()[:2] == [3.0, 1.0]
    assert all(f"{name} (category)" in text for name in ("Models", "Overall", "Code", "overall"))


def test_a_spreadsheet_computes_nothing_of_what_others_wrote(tmp_path: Path) -> None:
    names = ("=1+1", "+1", "-1.0", "@SUM(A1)", "a\nb")
    for name in names:
        row = make_row(1, "=qa", [2], 1.0) | {"model_id": name}
        write_answers(tmp_path / f"{names.index(name)}.jsonl", [row])
    out = tmp_path / "report"
    assert main([str(tmp_path), "--base", str(tmp_path / "0.jsonl"), "--out", str(out)]) == 0
    for file in ("leaderboard.csv", "spec-bench.csv", "questions.csv"):
        text = (out / file).read_text(encoding="utf-8")
        table = pd.read_csv(StringIO(text))
        column = "Models" if file == "spec-bench.csv" else "method"
        methods = set(table[column].dropna()[:5])
        assert methods <= {"'=1+1", "'+1", "'-1.0", "'@SUM(A1)", "a b", *table[column][5:]}
        assert text.count("\n") == len(table) + 1, "a line a row"
        assert not any(name.startswith("=") for name in table.columns)
        assert not re.search(r"(^|,)\"?[=+@]", text, re.MULTILINE)


def test_figures_of_a_csv_stay_figures() -> None:
    text = tables.csv_of(pd.DataFrame({"a": [-1.0, 2.5], "b": ["-", "=x"]}))
    assert text == "a,b\n-1.0,-\n2.5,'=x\n"


def test_published_files_may_be_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read the published figures .* --no-published"):
        read_published(tmp_path, ["A100"])


def test_tables_escape_and_align() -> None:
    assert tables.markdown_table(["a|b", "c"], [["x\ny", "10.00x"]]).splitlines() == [
        r"| a\|b |      c |",
        "| ---- | -----: |",
        "| x y  | 10.00x |",
    ]


def test_exit_codes(answers: Path) -> None:
    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "ignore", "-m", "evaluation.leaderboard", *map(str, words)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    good = run(answers)
    assert (good.returncode, good.stderr) == (0, "")
    bad = run(answers, "--base", "medusa")
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
    assert bad.stderr.startswith("error: the group model models/tiny")


@pytest.mark.parametrize("words", ["--published-device A100", "--published-model vicuna"])
def test_published_figures_are_not_chosen_where_none_are_shown(
    words: str, answers: Path, capsys: Capture
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(answers), "--no-published", *words.split()])
    assert stop.value.code == 2
    assert "got them with --no-published; leave one out" in capsys.readouterr().err


def test_all_files_are_written_though_the_reader_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Left(StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    file, out = _write(tmp_path, "vanilla", {"qa": 1.0}), tmp_path / "report"
    monkeypatch.setattr(sys, "stdout", Left())
    with pytest.raises(BrokenPipeError):
        main([str(file), "--out", str(out), "--no-published"])
    suffixes = {path.suffix for path in out.iterdir()}
    assert suffixes >= {".md", ".csv", ".json", ".html"}


def test_tables_are_shown_though_a_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [make_row(1, "qa", [1] * 4, 1.0)]
    answers = write_answers(tmp_path / "a.jsonl", rows, {"method": "vanilla"})
    files = ["--csv", str(tmp_path / "missing" / "a.csv"), "--json", str(tmp_path / "a.json")]
    with pytest.raises(UserError, match=r"cannot write .*a\.csv"):
        main([str(answers), "--no-published", *files])
    said = capsys.readouterr()
    assert "Vanilla" in said.out and "{" not in said.out
    assert "a.json" in said.err and (tmp_path / "a.json").exists(), "the others are written"
