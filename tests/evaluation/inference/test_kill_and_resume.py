"""A run that is killed at any moment and started again is the run that was not.

Two real runs with a hot matrix, side by side, each killed ten times, by SIGKILL and SIGTERM in turn,
at random calls: a few while the process loads, the others while it answers. Short answers, so that much
of the work is writing, where a kill could do harm. The single steps of an append are in test_log.
KILLS=100 in the environment is the long version.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.evaluation.conftest import ROOT, figures, read_rows, write_rows
from tests.evaluation.inference.killed_runs import ANSWERING, LOADING
from tests.hang import HANG

NUM_KILLS = int(os.environ.get("KILLS", "20"))
# Of each of the two runs.
PHASES = (LOADING, *[ANSWERING] * 4) * (NUM_KILLS // 10)
NUM_QUESTIONS = 40
RUNS = {"average": "--warmup 0", "original": "--policy original --warmup 1"}
STEPS = ("token_ids", "accept_lengths", "draft_tokens", "turns")


def killed_run(words: list[str], uncut: Path, cut: Path, seed: int) -> dict[str, Any]:
    """Return what a process of its own tells of a run that is killed again and again."""
    plan = {"words": words, "uncut": str(uncut), "cut": str(cut), "phases": PHASES, "seed": seed}
    done = subprocess.run(
        [sys.executable, "-m", "tests.evaluation.inference.killed_runs", json.dumps(plan)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG * max(1, NUM_KILLS // 20),
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["codes"] == [0, 0], f"the uncut run or the last part failed: {done.stderr}"
    assert told["killed"] == [-sent for sent in told["sent"]], (
        f"a kill came after the end of the process: {done.stderr}"
    )
    return told


def test_a_run_killed_at_random_moments_and_resumed_is_the_uncut_run(
    tiny_model: Path, tmp_path: Path
) -> None:
    rows = [
        {"question_id": number, "category": "qa", "turns": [f"What is {number} times 7?"]}
        for number in range(NUM_QUESTIONS)
    ]
    questions = write_rows(tmp_path / "question.jsonl", rows)
    words = ["--model-path", str(tiny_model), "--question-file", str(questions)]
    words += ["--threads", "1", "--max-new-tokens", "5"]
    with ThreadPoolExecutor(len(RUNS)) as pool:
        runs = {
            name: pool.submit(
                killed_run,
                [*words, *more.split()],
                tmp_path / f"{name}-uncut.jsonl",
                tmp_path / f"{name}.jsonl",
                seed,
            )
            for seed, (name, more) in enumerate(RUNS.items())
        }
        told = {name: run.result() for name, run in runs.items()}
    for name in RUNS:
        file = tmp_path / f"{name}.jsonl"
        rows, uncut_rows = read_rows(file), read_rows(tmp_path / f"{name}-uncut.jsonl")
        assert [row["question_id"] for row in rows] == list(range(NUM_QUESTIONS)), (
            "a row is lost, doubled or out of order"
        )
        assert figures(rows, *STEPS) == figures(uncut_rows, *STEPS), (
            "the resumed run drafted or emitted something else than the uncut one"
        )
        sizes = told[name]["sizes"]
        assert sizes == sorted(sizes), "a row was lost on the way"
        assert len(list(file.with_suffix(".state").iterdir())) == 1, "old state is left behind"
    sizes = [size for one in told.values() for size in one["sizes"]]
    assert len(sizes) == NUM_KILLS >= 20, f"{NUM_KILLS} kills were asked for"
    assert len(set(sizes)) >= 10, f"the kills should find the file in many states: {sizes}"
    assert 0 in sizes, "some kills should come before the first row"
