"""The check of a GPU: all of it on the simulated one, and what it does with failures, little time and no GPU."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from evaluation.answers.row import AnswerRow
from evaluation.inference.command import participant_of
from evaluation.questions.questions import load_questions, question_file_of
from model.commands.command_line import UserError
from model.commands.model_options import ModelOptions
from scripts.gpu_check import __main__ as command
from scripts.gpu_check import answers
from scripts.gpu_check.__main__ import PARTS, CheckPart, main, run_part
from scripts.gpu_check.bench import (
    EAGER,
    FAILED,
    FUSED,
    GRAPHS,
    NO_MEASUREMENT,
    ORIGINAL_SHAPE,
    PASSED,
    SKIPPED,
    Bench,
    Found,
)
from scripts.gpu_check.costs import laws
from scripts.gpu_check.verdicts import FAIL, NOT_MEASURED, PASS, verdicts
from tests.simulated_device.demo import demo_target
from tests.simulated_device.waits import WARNING, counted_waits

ROOT = Path(__file__).resolve().parents[2]
# Of questions about times and about fused passes, which a simulated device has not.
NOT_HERE = (
    *("same bits", "fused passes differs", "copy roofline", "nodes / one node", "stock graphs"),
    *("compiled generate", "plain batch"),
)


class Checked(NamedTuple):
    """A run of the whole check."""

    code: int
    report: dict[str, Any]
    text: str


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """The whole check on the simulated device."""
    out, text = tmp_path_factory.mktemp("check") / "gpu.json", io.StringIO()
    with redirect_stdout(text):
        code = main(["--device", "simulated", "--out", str(out)])
    return Checked(code, json.loads(out.read_text()), text.getvalue())


def test_the_check_passes_on_the_simulated_device(checked: Checked) -> None:
    parts = checked.report["parts"]
    assert checked.code == 0, [problem for part in parts.values() for problem in part["problems"]]
    assert {name: part["status"] for name, part in parts.items()} == {
        part.name: PASSED for part in PARTS
    }


def test_it_marks_its_times_as_no_measurement(checked: Checked) -> None:
    assert checked.report["times_are_measurements"] is False
    assert "tokens/s" in checked.text
    assert checked.text.count(NO_MEASUREMENT) > 5


def test_it_has_a_verdict_on_every_question(checked: Checked) -> None:
    by_question = {one["question"]: one["verdict"] for one in checked.report["verdicts"]}
    for question, verdict in by_question.items():
        is_elsewhere = any(part in question for part in NOT_HERE)
        assert verdict == (NOT_MEASURED if is_elsewhere else PASS), question
    assert sum(verdict == PASS for verdict in by_question.values()) == 4


def test_it_runs_each_kind_of_target_in_every_part(checked: Checked) -> None:
    figures = {name: part["figures"] for name, part in checked.report["parts"].items()}
    for part in ("passes", "steps", "answers"):
        assert {row["kind"] for row in figures[part]["rows"]} == {EAGER, GRAPHS}
    assert all(row["graphs"] > 0 for row in figures["steps"]["rows"] if row["kind"] == GRAPHS)
    assert "generate" in {row["method"] for row in figures["answers"]["rows"]}
    assert figures["laws"]["counts"]["passed"] > 1


def test_it_asks_for_no_tests_before_a_simulated_device_is_asked_for() -> None:
    code = "import sys, scripts.gpu_check.__main__; print([n for n in sys.modules if n[:5] == 'tests'])"
    asked = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert asked.stdout == "[]\n", asked.stderr


def test_without_tests_there_is_no_simulated_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tests.simulated_device.device", None)
    with pytest.raises(UserError, match=r"simulated, which is in tests/ of a checkout") as error:
        main(["--device", "simulated"])
    assert "\n" not in str(error.value)


def planted(bench: Bench, found: Found) -> None:
    raise RuntimeError("CUDA error: planted\nCUDA kernel errors might be reported later")


def good(bench: Bench, found: Found) -> None:
    found.figures["answer"] = 42


def test_a_part_that_fails_is_one_line_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = (CheckPart("bad", 0, planted, False), CheckPart("good", 0, good, False))
    monkeypatch.setattr(command, "PARTS", parts)
    out = tmp_path / "gpu.json"
    assert main(["--device", "simulated", "--out", str(out)]) == 1
    report = json.loads(out.read_text())
    assert [part["status"] for part in report["parts"].values()] == [FAILED, PASSED]
    assert report["parts"]["bad"]["problems"] == ["RuntimeError: CUDA error: planted"]
    assert report["parts"]["good"]["figures"] == {"answer": 42}
    assert report["verdicts"][-1]["verdict"] == FAIL
    assert report["verdicts"][-1]["figure"] == "failed: bad"
    assert "Traceback" in capsys.readouterr().err


def test_a_measurement_that_fails_does_not_stop_its_part() -> None:
    found = Found()
    assert found.attempt("first", lambda: 1 // 0) is None
    assert found.attempt("second", lambda: 2) == 2
    assert found.problems == ["first: ZeroDivisionError: integer division or modulo by zero"]


def real_bench(seconds: float) -> Bench:
    """Return the bench of a real device, which is not touched."""
    return Bench(ModelOptions(), ORIGINAL_SHAPE, time.perf_counter() + seconds)


@pytest.fixture
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no time pass."""
    now = time.perf_counter()
    monkeypatch.setattr(time, "perf_counter", lambda: now)


@pytest.mark.usefixtures("still_clock")
def test_a_part_that_would_not_fit_is_skipped_and_says_so() -> None:
    part = CheckPart("slow", 60, planted)
    found = run_part(part, real_bench(30))
    assert found.status == SKIPPED
    assert "takes about 60 s, and 30 s are left" in found.notes[0]
    assert run_part(part, real_bench(90)).status == FAILED


@pytest.mark.usefixtures("still_clock")
def test_cases_without_time_are_left_out_with_a_note() -> None:
    found = Found()
    assert list(real_bench(60).in_time("abc", found)) == ["a", "b", "c"]
    assert not found.notes
    assert list(real_bench(-1).in_time("abc", found)) == []
    assert found.notes == ["no time for 3 of 3 cases"]


def test_without_a_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"has no GPU here, and .*give --device simulated") as error:
        main([])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--minutes 0", "minutes: got 0.0; allowed"),
        ("--minutes nan", "minutes: got nan; allowed"),
        ("--shape 7b --model-path ORG/NAME", "shape: got 7b with --model-path"),
        ("--out nowhere/gpu.json", "out: "),
        ("--model-path nowhere", "model_path: got 'nowhere'"),
    ],
)
def test_wrong_options_are_one_line(words: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        main(["--device", "simulated", *words.split()])
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("code", "lines", "problems"),
    [
        (0, ["3 passed, 9 deselected in 1.0s"], []),
        (1, ["FAILED tests/a.py::test_a - no", "1 failed, 2 passed in 1.0s"], ["FAILED tests/a"]),
    ],
)
def test_laws_that_fail_are_problems(
    code: int, lines: list[str], problems: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = SimpleNamespace(returncode=code, stdout="\n".join(lines), stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *given, **named: done)
    found = Found()
    laws(real_bench(60), found)
    assert [problem[: len("FAILED tests/a")] for problem in found.problems] == problems
    bench = real_bench(60)
    (verdict,) = (one for one in verdicts(bench, {"laws": found}) if "laws" in one.question)
    assert (verdict.verdict, verdict.figure) == (FAIL if code else PASS, lines[-1])


def test_laws_that_did_not_run_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(returncode=1, stdout="", stderr="No module named pytest")
    monkeypatch.setattr(subprocess, "run", lambda *given, **named: done)
    with pytest.raises(RuntimeError, match=r"No module named pytest; .*requirements-test.txt"):
        laws(real_bench(60), Found())


def test_waits_on_a_gpu_are_torchs_warnings_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with counted_waits(None) as accounts:
        for _ in range(2):
            warnings.warn(f"{WARNING} CUDA operation", UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
    name = "tests/scripts/test_gpu_check.py:test_waits_on_a_gpu_are_torchs_warnings_by_place"
    assert accounts.waits == {("wait", name): 2}
    assert modes == ["warn", "default"]


@pytest.mark.parametrize("is_full", [False, True])
def test_answers_that_differ_are_judged(is_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target = demo_target("eager", "cpu")

    def judge(target: object) -> Any:
        raise torch.OutOfMemoryError

    if is_full:
        monkeypatch.setattr(answers, "Judge", judge)
    bench: Any = SimpleNamespace(
        device=target.device,
        target=lambda kind: target,
        in_time=lambda cases, found: iter(cases),
        conversation=real_bench(60).conversation,
    )
    question = load_questions(question_file_of("demo"))[0]

    def answered(kind: str, words: str, token_ids: list[int]) -> answers.Answered:
        choice = {"index": 0, "turns": ["hm"], "token_ids": [token_ids]}
        counts = {"new_tokens": [4], "wall_time": [1.0], "accept_lengths": [1] * 4}
        values = {"question_id": question.question_id, "category": question.category}
        line = json.dumps({**values, "choices": [choice | counts]})
        return answers.Answered(kind, words, [AnswerRow.from_json(line, "here")])

    every = [
        answered(EAGER, "vanilla", [65, 66, 67, 68]),
        answered(GRAPHS, "pld", [65, 66, 99, 68]),
    ]
    found = Found()
    answers._compare(bench, every, "demo", found)
    assert found.figures["differing"] == 1
    if not is_full:
        assert found.figures["bugs"] == 1
        what = f"pld, graphs, question {question.question_id}: BUG: tokens 67 and 99"
        assert what in found.problems[0]
    else:
        assert "not judged" in found.notes[0]
        assert not found.problems


def test_answers_are_read_from_the_files_of_their_own_methods(tmp_path: Path) -> None:
    participants = [
        participant_of(words) for words in ("pld", "generate-pld", "recycling-averaged")
    ]
    for question_id, participant in enumerate(participants):
        row = {"question_id": question_id, "category": "qa", "choices": []}
        file = tmp_path / f"{answers.FILES}-{participant.label}-float16-temp-0.0-128.jsonl"
        file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    for question_id, participant in enumerate(participants):
        (row,) = answers._rows_of(participant, str(tmp_path), "float16")
        assert row.question_id == question_id


def judged(part: str, **figures: dict[str, Any]) -> tuple[str, str]:
    """Return the verdict on the question that holds a text, and its figure, where parts found these figures."""
    parts = {name: Found(figures=found) for name, found in figures.items()}
    found = verdicts(real_bench(60), parts)
    (one,) = (one for one in found if part in one.question)
    return one.verdict, one.figure


@pytest.mark.parametrize(("ms", "verdict"), [(5.0, PASS), (5.6, FAIL)])
def test_more_nodes_are_judged_beside_one_after_the_fewest_cached_rows(
    ms: float, verdict: str
) -> None:
    row = {"kind": FUSED, "nodes": 1, "context": 512, "ms": 4.0, "share_of_copy": 0.8}
    rows = [
        row | {"kind": GRAPHS, "ms": 1.0},
        row,
        row | {"nodes": 81, "ms": ms},
        row | {"nodes": 81, "context": 1536, "ms": 9.0},
    ]
    judgement = judged("81 nodes", passes={"rows": rows})
    assert judgement == (verdict, f"{ms / 4:.2f} (512 cached)")
    assert judged("16 nodes", passes={"rows": rows}) == (NOT_MEASURED, "")


@pytest.mark.parametrize(("count", "verdict"), [(0, PASS), (1, FAIL)])
def test_an_answer_of_fused_passes_that_differs_is_a_failure(count: int, verdict: str) -> None:
    found = judged("no answer of fused passes", answers={"differing_fused": count})
    assert found == (verdict, f"{count} differ")


def test_bits_are_judged_by_what_the_proof_says() -> None:
    found = {"has_same_bits": False, "why_not": "beside 3 others after 5 tokens"}
    assert judged("same bits", passes=found) == (FAIL, "beside 3 others after 5 tokens")
    assert judged("same bits", passes={"rows": []}) == (NOT_MEASURED, "")


@pytest.mark.parametrize(("late", "verdict"), [(0, PASS), (2, FAIL)])
def test_captures_within_an_answer_are_a_failure(late: int, verdict: str) -> None:
    rows = [{"kind": GRAPHS, "method": "vanilla", "step": 5.5, "late_shapes": late}]
    assert judged("no graph captured", steps={"rows": rows}) == (verdict, f"{late} captured late")


@pytest.mark.parametrize(("share", "verdict"), [(0.79, PASS), (0.7, FAIL)])
def test_the_roofline_is_judged_by_the_fastest_pass_of_one_node(share: float, verdict: str) -> None:
    row = {"kind": FUSED, "nodes": 1, "context": 512, "ms": 4.0, "share_of_copy": share}
    others = [
        row | {"context": 64, "share_of_copy": 0.1},
        row | {"kind": EAGER, "share_of_copy": 0.99},
    ]
    rows = [*others, row, row | {"nodes": 8, "share_of_copy": 1.0}]
    assert judged("roofline", passes={"rows": rows}) == (verdict, f"{share:.0%} (512 cached)")


def rows_of(speeds: dict[tuple[str, str], int]) -> list[dict[str, Any]]:
    """Return rows of answers with these speeds, by kind and method."""
    return [
        {"kind": kind, "method": method, "tokens_per_second": speed}
        for (kind, method), speed in speeds.items()
    ]


def test_speeds_are_judged_over_stock_graphs_and_over_compiled_generate() -> None:
    speeds = {
        (GRAPHS, "hybrid"): 300,
        (FUSED, "hybrid"): 480,
        (FUSED, "generate-static"): 110,
        (FUSED, "recycling-auto"): 170,
    }
    found = {"rows": rows_of(speeds)}
    assert judged("hybrid >= 1.7x", answers=found) == (FAIL, "1.60x")
    assert judged("compiled generate", answers=found) == (PASS, "4.36x")
    assert judged("recycling-auto >=", answers=found) == (NOT_MEASURED, "")


def test_batches_are_judged_beside_the_plain_one() -> None:
    speeds = {(1, "vanilla"): 100, (2, "vanilla"): 200, (2, "hybrid"): 190, (4, "vanilla"): 300}
    rows = [
        {"batch_size": size, "method": method, "tokens_per_second": speed}
        for (size, method), speed in speeds.items()
    ]
    assert judged("2 to 16 texts", batches={"rows": rows}) == (FAIL, "2: 0.95x")


def test_the_kernels_of_fused_passes_compile_for_a_gpu_that_is_not_here() -> None:
    pytest.importorskip("triton.backends.nvidia")
    words = [sys.executable, "-m", "scripts.gpu_check.compiled"]
    given = ["--nodes", "1", "--capabilities", "90"]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        words + given, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    kernels = {line.split("|")[2].strip() for line in done.stdout.splitlines() if "sm_90" in line}
    assert kernels == {
        *("places_kernel", "residual_kernel", "product_kernel", "rotate_kernel"),
        *("committed_kernel", "tail_kernel", "gated_kernel"),
    }
