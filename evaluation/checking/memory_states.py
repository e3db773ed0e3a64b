"""A method's memory in several states, over equal questions: each state's answers and figures.

`compare_states.py` says what the states are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from evaluation.answers.row import AnswerRow
from evaluation.inference.config import QuestionOptions, RunConfig
from evaluation.inference.method import MethodAnswerer, Setup, load_answerer
from evaluation.inference.plan import Asked
from evaluation.questions.questions import Question
from evaluation.scoring.figures import OVERALL, in_task_order
from evaluation.scoring.intervals import RatioOfSums, paired_interval
from evaluation.scoring.per_question import question_frame
from model.commands.matrix_file import make_drafter, read_memory
from model.machine.progress import progress
from model.methods.registry import Method

HOT = "hot"


@dataclass(frozen=True, slots=True)
class State:
    """How a pass over the questions goes."""

    name: str
    questions: Sequence[Question]  # in the order asked
    # The ids of questions before which the memory is emptied.
    resets: frozenset[int | str] = frozenset()
    is_warm: bool = False  # whether the first question begins with a memory


def state_figures(rows: dict[str, list[AnswerRow]]) -> list[dict[str, Any]]:
    """Return mean accepted tokens by task and state, and each state against hot.

    `rows` are answers by state, to the same questions; `HOT` is among them.

    Returns:
        For every state: `state`, `tasks` (mean accepted tokens), `ratio` of the overall one to
        hot's, its `interval`, and whether that `is_different` from 1.
    """
    frames = {name: question_frame(answered) for name, answered in rows.items()}
    sound = set.intersection(
        *(set(frame.loc[frame["is_sound"], "question_id"]) for frame in frames.values())
    )
    parts = {
        name: frame[frame["question_id"].isin(sound)].set_index("question_id").sort_index()
        for name, frame in frames.items()
    }
    return [
        {"state": name, "tasks": _tasks(part), **_against(part, parts[HOT])}
        for name, part in parts.items()
    ]


def _tasks(frame: pd.DataFrame) -> dict[str, float]:
    sums = frame.groupby("task")[["accepted", "steps"]].sum()
    sums.loc[OVERALL] = sums.sum()
    ratios = sums["accepted"] / sums["steps"]
    return {str(task): float(ratios[task]) for task in in_task_order(sums.index)}


def _against(frame: pd.DataFrame, hot: pd.DataFrame) -> dict[str, Any]:
    sides = [part[name].to_numpy() for part in (frame, hot) for name in ("accepted", "steps")]
    ratio = RatioOfSums.of_rates(*sides)
    interval = paired_interval(ratio)
    return {
        "ratio": ratio.value,
        "interval": interval,
        "is_different": interval.excludes_one,
    }


def states_of(questions: Sequence[Question], seeds: Sequence[int]) -> list[State]:
    """Return the states, hot first: a warm one may begin with what it left."""
    by_category = sorted(questions, key=lambda question: question.category)
    firsts: dict[str, int | str] = {}
    for question in by_category:
        firsts.setdefault(question.category, question.question_id)
    return [
        State(HOT, questions),
        *(
            State(f"{HOT}, shuffle {seed}", QuestionOptions(shuffle=seed).in_order(questions))
            for seed in seeds
        ),
        State("per category", by_category, frozenset(firsts.values())),
        State("cold", questions, frozenset(question.question_id for question in questions)),
        State("warm", questions, is_warm=True),
    ]


def answer_states(
    answerer: MethodAnswerer, setup: Setup, states: Sequence[State]
) -> dict[str, list[AnswerRow]]:
    """Return the rows by state; where no memory was given, `warm` begins with what the first state left."""
    rows = {}
    for state in states:
        rows[state.name] = list(_answer(answerer, setup, state))
        if not setup.start_memory:
            memory = answerer.drafter.memory()
            setup.start_memory = {name: tensor.clone() for name, tensor in memory.items()}
    return rows


def _answer(answerer: MethodAnswerer, setup: Setup, state: State) -> Iterator[AnswerRow]:
    answerer.drafter.reset()
    if state.is_warm:
        answerer.drafter.load_memory(setup.start_memory)
    for question in progress(state.questions, desc=state.name, unit="question"):
        if question.question_id in state.resets:
            answerer.drafter.reset()
        yield setup.ask(answerer, question)


def load_setup(
    method: Method, asked: Asked, run: RunConfig, config: Any, matrix: str | None
) -> tuple[MethodAnswerer, Setup]:
    """Check that matrix and model fit, and load the model."""
    model, memory = asked.model, read_memory(matrix, asked.model.tokenizer)
    if model.vocab_size:
        make_drafter(method, config, model.vocab_size, model.device, memory)
    setup = Setup(method, run, config, model, asked.conversation, memory, method.name)
    return load_answerer(setup), setup
