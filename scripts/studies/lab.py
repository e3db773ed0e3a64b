"""The laboratory of a study: a recording that grows, the model behind it, and points of figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, groupby
from pathlib import Path
from typing import NamedTuple

from evaluation.inference.held_bytes import held_bytes
from evaluation.reporting.tables import Table
from model.commands.command_line import user_errors
from model.engine.loop import generate
from model.engine.target import TargetModel
from model.methods.recycling.tree_template import load_template
from scripts.replay.recording import Recording
from scripts.replay.scores import (
    Figures,
    TurnScore,
    check_replayable,
    check_text,
    drafter_from,
    is_recorded,
    score,
)
from scripts.replay.search_tree import FIRST_TEMPLATE, RankPath, learn, write_template
from scripts.replay.target import ReplayTarget

# Rank paths among which the paper's are looked up; the rest of them is too rare to be ordered.
NUM_RANKED = 1000


class Point(NamedTuple):
    """One row of a study's table."""

    series: str  # what is compared, such as a drafter
    x: float  # what is varied
    figures: Figures  # the means over all steps


@dataclass(frozen=True, slots=True)
class Study:
    """The outcome of a study."""

    question: str  # what was asked, in one line
    varied: str  # title of what is varied
    points: list[Point]  # in the order of the table
    note: str = ""  # what a reader must know to read the table right; may be empty
    tables: Sequence[Table] = ()  # more tables, below the one of the points


@dataclass(slots=True)
class Lab:
    """A recording with its model."""

    recording: Recording  # grows with every drafter that is run
    model: TargetModel
    folder: Path  # for templates, which drafters read from files
    files: Mapping[str, str] = field(default_factory=dict)  # by name, for lines that need one
    # Saves the recording where it has a file, so that a long study that is cut off does not begin anew.
    save: Callable[[], None] = lambda: None
    _target: ReplayTarget = field(init=False)

    def __post_init__(self) -> None:
        self._target = ReplayTarget(self.recording, self.model)

    def check(self, words: str) -> None:
        """Raise UserError if the recording cannot serve a drafter, or its heads are not of this model."""
        drafter = drafter_from(words, self.recording.source.vocab_size)
        if is_recorded(drafter):
            check_replayable(drafter, words, self.recording.source.top_k)
        else:
            with user_errors():
                drafter.check_target(self.model)

    def replays(self, words: str) -> bool:
        """Whether a drafter runs on the recording; else it must answer on the model itself."""
        return is_recorded(drafter_from(words, self.recording.source.vocab_size))

    def run_and_weigh(self, words: Sequence[str]) -> tuple[list[TurnScore], int]:
        """Run a drafter over all turns, with the next of these options for each next question, and what it
        knows going on from question to question; return its scores and the bytes that it holds then.
        """
        drafters = [drafter_from(each, self.recording.source.vocab_size) for each in words]
        questions = groupby(self.recording.turns, key=lambda turn: turn.question_id)
        before, scores = drafters[0], list[TurnScore]()
        for (_, turns), drafter in zip(questions, cycle(drafters), strict=False):
            if drafter is not before:
                drafter.load_memory(before.memory())
            scores += score(self._target, drafter, turns)
            before = drafter
        return scores, held_bytes(before)

    def ranked(self, half: int) -> list[RankPath]:
        """Return the paper's rank paths, those first that are right most often on every other question:
        half 0 begins with the first, half 1 with the second.
        """
        questions = list(dict.fromkeys(turn.question_id for turn in self.recording.turns))
        chosen = set(questions[half::2])
        turns = [turn for turn in self.recording.turns if turn.question_id in chosen]
        found = learn(self._target, turns, NUM_RANKED, num_rounds=1)
        places = {path: place for place, path in enumerate(found)}
        paths = load_template(FIRST_TEMPLATE).paths
        return sorted(paths, key=lambda path: (places.get(path, NUM_RANKED), len(path)))

    def template(self, name: str, paths: Sequence[RankPath]) -> str:
        """Write a template; return the option that makes recycling draft it."""
        file = self.folder / f"{name}.json"
        write_template(file, paths, "a study")
        return f"--tree-version {file}"

    def answer_and_weigh(self, words: str) -> tuple[list[TurnScore], int]:
        """Answer all prompts greedily, on the model itself, with a drafter that cannot be replayed; return its
        scores and the bytes that it holds then.

        Raises:
            RuntimeError: if an answer is not the recorded one.
        """
        source = self.recording.source
        drafter = drafter_from(words, source.vocab_size)
        scores = []
        for turn in self.recording.turns:
            answer = generate(
                self.model,
                drafter,
                turn.prompt_ids,
                max_new_tokens=source.max_new_tokens,
                eos_ids=source.eos_ids,
            )
            check_text(answer.token_ids, turn, drafter, source)
            counts = tuple(step.num_nodes for step in answer.steps)
            scores.append(TurnScore(turn, tuple(answer.accept_lengths), counts))
        return scores, held_bytes(drafter, apart_from=self.model)
