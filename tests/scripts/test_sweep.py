"""Sweeps: what is planned, what is refused, and that a cell that fails does not stop the others."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from model.commands.command_line import UserError
from scripts import sweep
from scripts.sweep import main, read_sweep

GOOD: dict[str, Any] = {
    "out": "results",
    "models": ["data/demo/model"],
    "runs": 2,
    "options": {"max_new_tokens": 8},
    "methods": ["vanilla", "pld", {"recycling": {"output_id_topk": 12, "start": "cold"}}],
}


def cells(**changed: Any) -> list[sweep.Cell]:
    return read_sweep(yaml.safe_dump({**GOOD, **changed}), "sweep s.yaml")


def test_runs_are_interleaved_and_their_order_rotates() -> None:
    methods = [cell.method for cell in cells()]
    assert methods == ["vanilla", "pld", "recycling", "pld", "recycling", "vanilla"]
    assert [cell.run for cell in cells()] == [1, 1, 1, 2, 2, 2]


def test_a_cell_is_an_inference_command_with_its_own_file() -> None:
    third = cells()[2]
    assert third.name == "model-demo-auto-recycling-output_id_topk-12-start-cold"
    assert third.file == Path("results/run-1") / f"{third.name}.jsonl"
    assert set(third.options) == {
        "--max-new-tokens=8",
        "--output-id-topk=12",
        "--start=cold",
        "--model-path=data/demo/model",
        "--bench-name=demo",
        "--dtype=auto",
        f"--answer-file={third.file}",
    }
    assert len({cell.file for cell in cells(runs=3, dtypes=["float32", "bfloat16"])}) == 18


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"methods": ["vanila"]}, "did you mean vanilla"),
        ({"methods": []}, "methods"),
        ({"methods": [{"pld": {"max_ngram_size": 0}}]}, "max_ngram_size: got 0"),
        ({"methods": ["pld", "pld"]}, "there twice"),
        ({"methods": ["pld", "recycling"]}, "vanilla, the leaderboard's baseline, must be among"),
        ({"models": "data/demo/model"}, "models"),
        ({"models": ["a\0b"]}, "models"),
        ({"runs": 0}, "runs"),
        ({"runs": 10**9}, "runs"),
        ({"runs": True}, "runs"),
        ({"options": {"max_new_token": 8}}, "did you mean max_new_tokens"),
        ({"options": {"answer_file": "x"}}, "answer_file is the sweep's own"),
        ({"options": {"max_new_tokens": 0}}, "max_new_tokens: got 0"),
        ({"options": {"max_new_tokens": [1]}}, "options"),
        ({"out": None}, "out"),
        ({"extra": 1}, "keys"),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as error:
        cells(**changed)
    assert says in str(error.value)
    assert str(error.value).startswith("sweep s.yaml")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["a: [", "!!python/object/apply:os.getcwd []", "- 1", "", "!!int ''"]
)
def test_what_is_no_sweep_is_refused_and_runs_nothing(text: str) -> None:
    with pytest.raises(UserError, match=r"sweep s\.yaml"):
        read_sweep(text, "sweep s.yaml")


class Commands:
    """Stands for the inference commands: writes what a finished run leaves, or fails."""

    def __init__(self, fails: str) -> None:
        self.ran: list[str] = []
        self._fails = fails

    def __call__(self, command: list[str]) -> SimpleNamespace:
        module = command[2].removeprefix("evaluation.")
        self.ran.append(module)
        if module == "leaderboard":
            self.reported = command[command.index("--") + 1 :]
            return SimpleNamespace(returncode=0)
        if self._fails in module:
            return SimpleNamespace(returncode=2)
        file = Path(command[-1].removeprefix("--answer-file="))
        file.write_text("{}\n")
        times = {"start_time": 60.0, "end_time": 180.0}
        file.with_suffix(".meta.json").write_text(json.dumps(times))
        return SimpleNamespace(returncode=0)


def test_a_cell_that_fails_does_not_stop_the_rest_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(yaml.safe_dump({**GOOD, "out": str(tmp_path / "out")}))
    failing = Commands(fails="pld")
    monkeypatch.setattr(subprocess, "run", failing)
    assert main([str(file), "--dry-run"]) == 0
    assert not failing.ran, "a dry run ran something"
    assert main([str(file)]) == 1
    methods = ["vanilla", "pld", "recycling", "pld", "recycling", "vanilla"]
    assert failing.ran == [*(f"inference_{method}" for method in methods), "leaderboard"]
    assert len(failing.reported) == 4, "the report should hold what is finished"
    seen = capsys.readouterr()
    assert "6 cells: 6 left; how long is known after the first" in seen.out
    assert "5 left, about 10.0 minutes" in seen.err
    assert "run 2, model-demo-auto-pld: failed with exit code 2" in seen.err

    mended = Commands(fails="nothing")
    monkeypatch.setattr(subprocess, "run", mended)
    assert main([str(file)]) == 0
    assert mended.ran == failing.ran, (
        "finished cells' commands see whether they are still what is asked"
    )
    assert len(mended.reported) == 6
    changed = Commands(fails="recycling")  # as one does whose answers are of other options
    monkeypatch.setattr(subprocess, "run", changed)
    assert main([str(file)]) == 1
    assert len(changed.reported) == 4, "the report should not hold what is refused"


def test_all_cells_count_and_a_home_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cells(out="~/sw")[0].file.is_relative_to(tmp_path / "sw")
    with pytest.raises(UserError, match="cells at most in all"):
        cells(
            runs=1 + sweep.MAX_CELLS // 12, benches=["demo", "mbpp"], dtypes=["float32", "bfloat16"]
        )
