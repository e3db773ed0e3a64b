"""A run that is killed again and again: the process beside `test_kill_and_resume`.

Moments are numbers of calls, not times, so that they are the same on every machine. Each part of the run
is a fork of this process, which has imported everything and computed nothing.

Run: python -m tests.evaluation.inference.killed_runs JSON, with the arguments of `kill_again_and_again`.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import evaluation.inference.run  # noqa: F401 - every part of the run needs it
from evaluation.answers.row import Turn
from evaluation.inference import command
from evaluation.inference.answering import Prompt
from evaluation.inference.method import MethodAnswerer

LOADING, ANSWERING = 0, 1
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
# Calls of the running part in each phase, seen by both processes.
NUM_CALLS = memoryview(mmap.mmap(-1, 16)).cast("q")


class Kill(NamedTuple):
    """A signal at a call of a phase."""

    phase: int
    place: int
    signal_number: int


def run(words: list[str], kill: Kill | None = None, is_counted: bool = True) -> int:
    """Run the command in a process of its own; return the exit code, or minus the signal's number."""
    NUM_CALLS[LOADING] = NUM_CALLS[ANSWERING] = 0
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 70
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if is_counted:
            _count_calls(kill)
        code = command.main("recycling", words)
    finally:
        os._exit(code)


def _count_calls(kill: Kill | None) -> None:
    """Count calls from here on; answering begins with the first question.

    Counting is slow: a run that is to be killed while it answers loads without it.
    """
    phase = LOADING
    answer = MethodAnswerer.answer

    def first_answer(self: MethodAnswerer, prompt: Prompt) -> Turn:
        nonlocal phase
        if phase == LOADING:
            phase = ANSWERING
            sys.setprofile(count)
        return answer(self, prompt)

    def count(_: FrameType, event: str, __: Any) -> None:
        if event in ("call", "c_call"):
            NUM_CALLS[phase] += 1
            if kill and (phase, NUM_CALLS[phase]) == kill[:2]:
                os.kill(os.getpid(), kill.signal_number)

    MethodAnswerer.answer = first_answer  # type: ignore[method-assign]
    if kill is None or kill.phase == LOADING:
        sys.setprofile(count)


def kill_again_and_again(
    words: list[str], uncut: str, cut: str, phases: list[int], seed: int
) -> dict[str, Any]:
    """Make a run without a kill, and one with a kill at a random call of each of these phases.

    Args:
        words: the command's, the answer files' names apart.
        uncut: answer file of the run that is not killed.
        cut: that of the other.
        phases: one for each kill.
        seed: of the calls.

    Returns:
        Exit codes of the first run and of the last part of the second, signals and exit codes of its
        killed parts, and sizes of its answer file after each kill.
    """
    draw = random.Random(seed)
    codes = [run([*words, "--answer-file", uncut])]
    # Even if every kill came as late as it may, something would be left for the next.
    longest = (NUM_CALLS[LOADING], int(0.8 * NUM_CALLS[ANSWERING] / phases.count(ANSWERING)))
    sent, killed, sizes = [], [], []
    for number, phase in enumerate(phases):
        kill = Kill(phase, 1 + draw.randrange(longest[phase]), SIGNALS[number % 2])
        sent.append(int(kill.signal_number))
        killed.append(run([*words, "--answer-file", cut], kill))
        sizes.append(Path(cut).stat().st_size if Path(cut).exists() else 0)
    codes.append(run([*words, "--answer-file", cut], is_counted=False))
    return {"codes": codes, "sent": sent, "killed": killed, "sizes": sizes}


if __name__ == "__main__":
    print(json.dumps(kill_again_and_again(**json.loads(sys.argv[1]))))
