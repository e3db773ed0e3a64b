"""The check of a GPU: all of it on the simulated one, and what it does with failures, little time and no GPU."""

from __future__ import annotations

import io
import json
import time
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from evaluation.answering.entrants import entrant_of
from evaluation.answers.row import Turn
from model.commands.command_line import UserError
from model.commands.model_options import ModelOptions
from scripts.gpu_check import command
from scripts.gpu_check.bench import AS_IT_IS, EAGER, GRAPHS, Bench
from scripts.gpu_check.blocks import decoding, methods, steps, verdicts
from scripts.gpu_check.blocks.passes import peak_bandwidth
from scripts.gpu_check.command import BLOCKS, Block, main, run_block
from scripts.gpu_check.findings import FAILED, PASSED, SKIPPED, Findings, Result
from scripts.gpu_check.report import NO_MEASUREMENT
from scripts.gpu_check.sizes import SIMULATED
from tests.simulated_device.demo import Costs, Decoded, Run, Setting, demo_target, prompt_of
from tests.simulated_device.waits import WARNING, counted_waits

TIMED = ("tree step", "copy roofline", "own vanilla", "generate", "plans")


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
    problems = [problem for block in checked.report["blocks"] for problem in block["problems"]]
    assert checked.code == 0, problems
    found = {block["block"]: block["status"] for block in checked.report["blocks"]}
    assert found == {block.number: PASSED for block in BLOCKS} | {7: SKIPPED}


def test_it_marks_its_times_as_no_measurement(checked: Checked) -> None:
    assert checked.report["times_are_measurements"] is False
    assert "decode tokens/s" in checked.text
    assert checked.text.count(NO_MEASUREMENT) > 8


def test_it_has_a_verdict_on_every_question(checked: Checked) -> None:
    by_question = {one["question"]: one["verdict"] for one in checked.report["verdicts"]}
    for question, verdict in by_question.items():
        is_timed = any(part in question for part in TIMED)
        expected = verdicts.NOT_MEASURED if is_timed else verdicts.PASS
        assert verdict == expected, question
    assert sum(verdict == verdicts.NOT_MEASURED for verdict in by_question.values()) == len(TIMED)
    assert any("eval.sh" in line for line in checked.report["commands"])


def test_it_runs_each_kind_of_target_in_every_block(checked: Checked) -> None:
    figures = {block["block"]: block["figures"] for block in checked.report["blocks"]}
    assert {row["kind"] for row in figures[1]["runs"]} == {"eager", "static", "graphed"}
    for block in (3, 5):
        assert {row["kind"] for row in figures[block]["rows"]} == {EAGER, GRAPHS}
    assert {row["kind"] for row in figures[4]["parts"]} == {EAGER, GRAPHS}
    assert len(figures[4]["kernels"]) == 4
    assert set(figures[3]["tree_over_one"]) == {"eager after 40", "graphs after 40"}
    assert all(row["graphs"] > 0 for row in figures[6]["rows"])
    names = {row["name"] for row in figures[2]["rows"]}
    assert {"math", "folded", "products"} <= names


def planted(bench: Bench) -> Findings:
    raise RuntimeError("CUDA error: planted\nCUDA kernel errors might be reported later")


def test_a_block_that_fails_is_one_line_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Block(1, "good", 0, lambda bench: Findings(figures={"answer": 42}))
    blocks = (Block(0, "bad", 0, planted), good, BLOCKS[-1])
    monkeypatch.setattr(command, "BLOCKS", blocks)
    out = tmp_path / "gpu.json"
    assert main(["--device", "simulated", "--out", str(out), "--debug"]) == 1
    report = json.loads(out.read_text())
    assert [block["status"] for block in report["blocks"]] == [FAILED, PASSED, PASSED]
    assert report["blocks"][0]["problems"] == ["RuntimeError: CUDA error: planted"]
    assert report["blocks"][1]["figures"] == {"answer": 42}
    assert report["verdicts"][-1]["verdict"] == verdicts.FAIL
    assert report["verdicts"][-1]["figure"] == "failed: 0"
    assert "Traceback" in capsys.readouterr().err


def test_a_measurement_that_fails_does_not_stop_its_block() -> None:
    found = Findings()
    assert found.attempt("first", lambda: 1 // 0) is None
    assert found.attempt("second", lambda: 2) == 2
    assert found.problems == ["first: ZeroDivisionError: integer division or modulo by zero"]


def real_bench(seconds: float) -> Bench:
    """Return the bench of a real device, which is not touched."""
    return Bench(ModelOptions(), AS_IT_IS, SIMULATED, time.perf_counter() + seconds)


def test_a_block_that_would_not_fit_is_skipped_and_says_so() -> None:
    block = Block(3, "slow", 60, planted)
    result = run_block(block, real_bench(30))
    assert result.status == SKIPPED
    assert "takes about 60 s, and 30 s are left" in result.findings.notes[0]
    assert run_block(block, real_bench(90)).status == FAILED


def test_cases_without_time_are_left_out_with_a_note() -> None:
    found = Findings()
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
        ("--blocks 0 10", "blocks: got 10; allowed: 0 to 9"),
        ("--minutes 0", "minutes: got 0.0; allowed"),
        ("--minutes nan", "minutes: got nan; allowed"),
        ("--compile", "compile: got it with --device simulated"),
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


def run_of(tokens: list[int], accept_lengths: list[int], num_waits: int = 1) -> Run:
    """Return a run of one text."""
    costs = Costs()
    costs.waits["wait at read_out"] = num_waits
    return Run([Decoded(tokens, accept_lengths)], costs)


@pytest.mark.parametrize(
    ("decoded", "problem"),
    [
        (run_of([5, 6, 7], [2, 1]), ""),
        (run_of([5, 6, 8], [2, 1]), "other tokens"),
        (run_of([5, 6, 7], [1, 2]), "other steps"),
        (run_of([5, 6, 7], [2, 1], num_waits=2), "waits 2 times"),
    ],
)
def test_runs_are_held_to_the_cpus(decoded: Run, problem: str) -> None:
    found = Findings()
    methods._row(GRAPHS, Setting("pld"), decoded, run_of([5, 6, 7], [2, 1]), found)
    assert bool(found.problems) == bool(problem)
    assert problem in "".join(found.problems)


@pytest.mark.parametrize("free", [2**40, 0])
def test_answers_that_differ_are_judged(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = demo_target("eager", "cpu")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    bench: Any = SimpleNamespace(
        device=target.device,
        target=lambda kind: target,
        in_time=lambda cases, found: iter(cases),
    )
    prompt = prompt_of("USER: Tell me about the sea. ASSISTANT:")
    plain, other = [65, 66, 67, 68], [65, 66, 99, 68]
    answers = [
        decoding.Answers(EAGER, entrant_of("vanilla"), [Turn(plain, [1] * 4, 1.0)], 1.0, 0),
        decoding.Answers(GRAPHS, entrant_of("pld"), [Turn(other, [2] * 2, 1.0)], 1.0, 0),
    ]
    found = Findings()
    decoding._compare(bench, answers, [prompt], found)
    assert found.figures["differing"] == 1
    if free:
        assert found.figures["bugs"] == 1
        assert "pld, graphs, text 0: BUG: tokens 67 and 99" in found.problems[0]
    else:
        assert "not judged" in found.notes[0]
        assert not found.problems


def test_kernels_are_summed_up_by_name_a_step() -> None:
    kernels = [("norm", 2.0), ("product", 50.0), ("norm", 2.5), ("norm", 3.5)]
    found = steps.summary(kernels, num_steps=2)
    assert found["kernels_a_step"] == 2
    assert found["microseconds_a_step"] == 29
    assert found["short_microseconds_a_step"] == 2.25
    assert found["top"] == [
        {"name": "product", "microseconds": 25, "count": 0.5},
        {"name": "norm", "microseconds": 4, "count": 1.5},
    ]
    with pytest.raises(RuntimeError, match="saw no kernels"):
        steps.summary([], num_steps=2)


def with_figures(**figures: dict[str, Any]) -> Bench:
    """Return the bench of a real device whose blocks found these figures, by "block_N"."""
    bench = real_bench(60)
    for name, found in figures.items():
        number = int(name.removeprefix("block_"))
        bench.results[number] = Result(number, name, PASSED, 1.0, Findings(figures=found))
    return bench


def judged(bench: Bench, part: str) -> tuple[str, str]:
    """Return the verdict on the question that holds a text, and its figure."""
    found = verdicts.verdicts(bench).figures["verdicts"]
    (one,) = (one for one in found if part in one["question"])
    return one["verdict"], one["figure"]


@pytest.mark.parametrize(("tree", "verdict"), [(6.5, verdicts.PASS), (8.0, verdicts.FAIL)])
def test_the_trees_step_is_judged_as_graphs(tree: float, verdict: str) -> None:
    parts = [
        {"kind": EAGER, "method": "vanilla", "step": 1.0},
        {"kind": GRAPHS, "method": "vanilla", "step": 5.5},
        {"kind": GRAPHS, "method": "recycling", "step": tree},
    ]
    bench = with_figures(block_4={"parts": parts})
    assert judged(bench, "tree step") == (verdict, f"{tree / 5.5:.2f}")


@pytest.mark.parametrize(("share", "verdict"), [(0.86, verdicts.PASS), (0.8, verdicts.FAIL)])
def test_the_roofline_is_judged_by_the_fastest_pass_of_one_node(share: float, verdict: str) -> None:
    row = {"kind": GRAPHS, "nodes": 1, "context": 512, "share_of_copy": share}
    others = [row | {"share_of_copy": 0.1}, row | {"kind": EAGER, "share_of_copy": 0.99}]
    bench = with_figures(block_3={"rows": [*others, row, row | {"nodes": 8, "share_of_copy": 1.0}]})
    assert judged(bench, "roofline") == (verdict, f"{share:.0%} (graphs, 512 cached)")


def test_speeds_are_judged_over_their_own_vanilla_and_over_generate() -> None:
    speeds = {
        (EAGER, "vanilla"): 50,
        (EAGER, "generate"): 40,
        (EAGER, "recycling"): 200,
        (GRAPHS, "vanilla"): 100,
        (GRAPHS, "recycling"): 150,
        (GRAPHS, "recycling-auto"): 170,
    }
    rows = [
        {"kind": kind, "method": method, "tokens_per_second": speed}
        for (kind, method), speed in speeds.items()
    ]
    bench = with_figures(block_5={"rows": rows})
    assert judged(bench, "own vanilla") == (verdicts.FAIL, "1.70x (recycling-auto, graphs)")
    assert judged(bench, "x of generate") == (verdicts.PASS, "4.25x (recycling-auto, graphs)")


@pytest.mark.parametrize(
    ("names", "verdict"), [(["cudnn"], verdicts.PASS), (["cudnn", "flash"], verdicts.FAIL)]
)
def test_plans_of_attention_that_is_turned_off_are_no_failure(
    names: list[str], verdict: str
) -> None:
    bench = with_figures(block_2={"with_plans": names})
    assert judged(bench, "plans")[0] == verdict


def test_peaks_are_known_by_the_names_of_devices() -> None:
    assert peak_bandwidth("NVIDIA H100 80GB HBM3") == 3.35e12
    assert peak_bandwidth("NVIDIA A100-SXM4-40GB") == 1.555e12
    assert peak_bandwidth("NVIDIA A100-SXM4-80GB") == 2.039e12
    assert peak_bandwidth("a card of next year") is None
