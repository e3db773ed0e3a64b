"""A run that is killed at any moment and started again is the run that was not.

Two real runs with a hot matrix, side by side, each killed ten times, by SIGKILL and SIGTERM in turn,
at random moments: a few while the process still imports and loads, the others while it answers.
Short answers, so that much of the time goes into writing, where a kill could do harm. The single
steps of an append are in test_answers. KILLS=100 in the environment is the long version.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.evaluation.conftest import ROOT, figures, read_meta, read_rows, run, write_rows

NUM_KILLS = int(os.environ.get("KILLS", "20"))
# Of each of the two runs.
KILLED_WHILE = ("loading", *["answering"] * 4) * (NUM_KILLS // 10)
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
NUM_QUESTIONS = 150
RUNS = {"average": "--warmup 0", "original": "--policy original --warmup 1"}
# Seconds that imports and weights take, or a part of them.
LOADING = 2.0
PATIENCE = 120.0
STEPS = ("token_ids", "accept_lengths", "draft_tokens", "turns")


@dataclass
class Killed:
    """A run that is killed and started again.

    Attributes:
        command: the command, the answer file's name apart.
        file: the answer file.
        window: kills while answering come at most this many seconds after its begin.
        draw: source of the moments.
        sizes: size of the answer file after every kill.
    """

    command: list[str]
    file: Path
    window: float
    draw: random.Random
    sizes: list[int] = field(default_factory=list)

    def run_to_the_end(self) -> None:
        """Kill the run again and again, then let it finish."""
        for phase in KILLED_WHILE:
            self._kill_once(phase == "loading")
        process = self._start()
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, f"the last part of the run failed: {errors}"

    def _kill_once(self, is_loading: bool) -> None:
        earlier_begin = self._begin_stamp()
        process = self._start()
        if is_loading:
            time.sleep(self.draw.uniform(0, LOADING))
        else:
            deadline = time.monotonic() + PATIENCE
            while self._begin_stamp() == earlier_begin and process.poll() is None:
                assert time.monotonic() < deadline, "the run does not begin to answer"
                time.sleep(0.002)
            time.sleep(self.draw.uniform(0, self.window))
        sent = SIGNALS[len(self.sizes) % 2]
        process.send_signal(sent)
        _, errors = process.communicate()
        assert process.returncode == -sent, (
            f"kill {len(self.sizes) + 1} came after the end of the process, which exited with "
            f"{process.returncode}: {errors}"
        )
        self.sizes.append(self.file.stat().st_size if self.file.exists() else 0)

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.command, "--answer-file", str(self.file)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def _begin_stamp(self) -> int:
        """Return what changes whenever a part of the run begins: the inode of its sidecar."""
        try:
            return self.file.with_suffix(".meta.json").stat().st_ino
        except FileNotFoundError:
            return 0


@pytest.fixture
def short_options(tiny_model: Path, tmp_path: Path) -> list[str]:
    """Options of a run over many short questions."""
    rows = [
        {"question_id": number, "category": "qa", "turns": [f"What is {number} times 7?"]}
        for number in range(NUM_QUESTIONS)
    ]
    questions = write_rows(tmp_path / "question.jsonl", rows)
    options = ["--model-path", str(tiny_model), "--question-file", str(questions)]
    return [*options, "--threads", "1", "--max-new-tokens", "5"]


def test_a_run_killed_at_random_moments_and_resumed_is_the_uncut_run(
    short_options: list[str], tmp_path: Path
) -> None:
    killed = []
    for number, (name, more) in enumerate(RUNS.items()):
        uncut = tmp_path / f"{name}-uncut.jsonl"
        assert run("recycling", short_options, uncut, *more.split()) == 0
        meta = read_meta(uncut)
        seconds = meta["end_time"] - meta["start_time"]
        # Even if every kill came as late as it may, something would be left for the next.
        window = 0.8 * seconds / KILLED_WHILE.count("answering")
        command = [sys.executable, "-m", "evaluation.inference_recycling", *short_options]
        file = tmp_path / f"{name}.jsonl"
        killed.append(Killed([*command, *more.split()], file, window, random.Random(number)))
    with ThreadPoolExecutor(len(killed)) as pool:
        for done in [pool.submit(one.run_to_the_end) for one in killed]:
            done.result()
    for one in killed:
        rows = read_rows(one.file)
        uncut_rows = read_rows(one.file.with_stem(one.file.stem + "-uncut"))
        assert [row["question_id"] for row in rows] == list(range(NUM_QUESTIONS)), (
            "a row is lost, doubled or out of order"
        )
        assert figures(rows, *STEPS) == figures(uncut_rows, *STEPS), (
            "the resumed run drafted or emitted something else than the uncut one"
        )
        assert one.sizes == sorted(one.sizes), "a row was lost on the way"
        assert len(list(one.file.with_suffix(".state").iterdir())) == 1, "old state is left behind"
    sizes = [size for one in killed for size in one.sizes]
    assert len(sizes) == NUM_KILLS >= 20, f"{NUM_KILLS} kills were asked for"
    assert len(set(sizes)) >= 10, f"the kills should find the file in many states: {sizes}"
    assert 0 in sizes, "some kills should come before the first row"
