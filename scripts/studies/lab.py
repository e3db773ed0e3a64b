"""Common ground of the studies: a recording that grows, the model behind it, and points of figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, groupby
from pathlib import Path
from typing import NamedTuple

import torch

from evaluation.questions.conversation import Conversation
from evaluation.reporting.tables import Table
from model.commands.command_line import user_errors
from model.engine.drafter import Drafter
from model.engine.loop import generate
from model.engine.rules import SamplingRule, TokenRule, sampling_processors
from model.engine.target import TargetModel
from model.methods.recycling.tree_template import load_template
from scripts.replay.recording import RecordedTurn, Recording
from scripts.replay.scores import (
    Figures,
    TurnScore,
    check_replayable,
    check_text,
    drafter_from,
    figures,
    score,
)
from scripts.replay.search_tree import FIRST_TEMPLATE, RankPath, learn, write_template
from scripts.replay.target import ReplayTarget
from scripts.studies.held_bytes import held_bytes

# Rank paths among which the paper's are looked up; the rest of them is too rare to be ordered.
NUM_RANKED = 1000


class Point(NamedTuple):
    """One row of a study's table.

    Attributes:
        series: what is compared, such as a drafter.
        x: what is varied: a number for a line, a name for a bar.
        figures: the means over all steps.
    """

    series: str
    x: float | str
    figures: Figures


@dataclass(frozen=True, slots=True)
class Study:
    """The outcome of a study.

    Attributes:
        question: what was asked, in one line.
        varied: title of what is varied.
        points: in the order of the table.
        note: what a reader must know to read the table right; may be empty.
        is_greedy: whether all answers are.
        tables: more tables, below the one of the points.
    """

    question: str
    varied: str
    points: list[Point]
    note: str = ""
    is_greedy: bool = True
    tables: Sequence[Table] = ()


@dataclass(slots=True)
class Lab:
    """A recording with its model.

    Attributes:
        recording: grows with every drafter that is run.
        model: the model.
        conversation: how its prompts are made.
        folder: for templates, which drafters read from files.
        files: files by name, for the lines of a field that need one.
        save: saves the recording where it has a file, so that a long study that is cut off does not begin anew.
    """

    recording: Recording
    model: TargetModel
    conversation: Conversation
    folder: Path
    files: Mapping[str, str] = field(default_factory=dict)
    save: Callable[[], None] = lambda: None
    _target: ReplayTarget = field(init=False)

    def __post_init__(self) -> None:
        self._target = ReplayTarget(self.recording, self.model)

    @property
    def learning(self) -> list[RecordedTurn]:
        """The turns of every other question: what templates are learned from."""
        return self._half(1)

    def run(
        self,
        words: str,
        turns: Sequence[RecordedTurn] | None = None,
        memory: Mapping[str, torch.Tensor] | None = None,
    ) -> list[TurnScore]:
        """Run a drafter over turns (default: all), each question begun with `memory` if given."""
        drafter = self._drafter(words)
        return score(
            self._target, drafter, self.recording.turns if turns is None else turns, memory
        )

    def check(self, words: str) -> None:
        """Refuse a drafter that the recording cannot serve, or whose heads are not of this model.

        Raises:
            UserError: with the reason.
        """
        drafter = drafter_from(words, self.recording.source.vocab_size)
        if drafter.hidden_layers:
            with user_errors():
                drafter.check_target(self.model)
        else:
            check_replayable(drafter, words, self.recording.source.top_k)

    def run_and_weigh(self, words: str) -> tuple[list[TurnScore], int]:
        """Run a drafter over all turns; return its scores and the bytes that it holds then."""
        drafter = self._drafter(words)
        scores = score(self._target, drafter, self.recording.turns)
        return scores, held_bytes(drafter)

    def run_by_half(self, words: Sequence[str]) -> tuple[list[TurnScore], int]:
        """Run a drafter with options of their own for every other question (`questions_of_half`); what it knows
        goes on from question to question. Return the scores of all turns, and the bytes held after the last.
        """
        drafters = [self._drafter(each) for each in words]
        questions = groupby(self.recording.turns, key=lambda turn: turn.question_id)
        before, scores = None, list[TurnScore]()
        for (_, turns), drafter in zip(questions, cycle(drafters), strict=False):
            if before:
                drafter.load_memory(before.memory())
            scores += score(self._target, drafter, turns)
            before = drafter
        return scores, held_bytes(before)

    def measure(self, words: str, turns: Sequence[RecordedTurn] | None = None) -> Figures:
        """Return the means of a drafter over turns (default: all)."""
        return figures(self.run(words, turns))

    def measure_held_out(self, words: str) -> Figures:
        """Return the means of a drafter that answers all turns over those that no template was learned
        from.
        """
        held_out = self.questions_of_half(0)
        return figures([each for each in self.run(words) if each.turn.question_id in held_out])

    def memory_after(self, words: str, turns: Sequence[RecordedTurn]) -> dict[str, torch.Tensor]:
        """Return the memory of a drafter that has answered these turns."""
        drafter = self._drafter(words)
        score(self._target, drafter, turns)
        return drafter.memory()

    def learn(self, num_nodes: int, num_ranks: int = 8) -> list[RankPath]:
        """Return the rank paths that are right most often on the learning half."""
        return learn(self._target, self.learning, num_nodes, num_ranks)

    def ranked(self, half: int = 1) -> list[RankPath]:
        """Return the paper's rank paths, those first that are right most often on a half of the questions."""
        found = learn(self._target, self._half(half), NUM_RANKED, num_rounds=1)
        places = {path: place for place, path in enumerate(found)}
        paths = load_template(FIRST_TEMPLATE).paths
        return sorted(paths, key=lambda path: (places.get(path, NUM_RANKED), len(path)))

    def template(self, name: str, paths: Sequence[RankPath]) -> str:
        """Write a template; return the option that makes recycling draft it."""
        file = self.folder / f"{name}.json"
        write_template(file, paths, "a study")
        return f"--tree-version {file}"

    def sample(self, words: str, temperature: float) -> list[TurnScore]:
        """Answer all prompts with sampling, on the model itself; every drafter draws alike."""
        generator = torch.Generator(device=self.model.device).manual_seed(0)
        rule = None
        if temperature:
            rule = SamplingRule(sampling_processors(temperature, 0, 1.0), generator)
        return self._answer(drafter_from(words, self.recording.source.vocab_size), rule)

    def answer_and_weigh(self, words: str) -> tuple[list[TurnScore], int]:
        """Answer all prompts greedily, on the model itself, with a drafter that cannot be replayed; return its
        scores and the bytes that it holds then.

        Raises:
            RuntimeError: if an answer is not the recorded one.
        """
        drafter = drafter_from(words, self.recording.source.vocab_size)
        scores = self._answer(drafter, None)
        for found, recorded in zip(scores, self.recording.turns, strict=True):
            check_text(found.turn.answer_ids, recorded, drafter, self.recording.source)
        return scores, held_bytes(drafter, apart_from=self.model)

    def _answer(self, drafter: Drafter, rule: TokenRule | None) -> list[TurnScore]:
        """Answer all prompts on the model itself."""
        source = self.recording.source
        scores = []
        for turn in self.recording.turns:
            answer = generate(
                self.model,
                drafter,
                turn.prompt_ids,
                max_new_tokens=source.max_new_tokens,
                eos_ids=source.eos_ids,
                rule=rule,
            )
            told = replace(turn, answer_ids=tuple(answer.token_ids))
            counts = tuple(step.num_nodes for step in answer.steps)
            scores.append(TurnScore(told, tuple(answer.accept_lengths), counts))
        return scores

    def _drafter(self, words: str) -> Drafter:
        source = self.recording.source
        drafter = drafter_from(words, source.vocab_size)
        check_replayable(drafter, words, source.top_k)
        return drafter

    def questions_of_half(self, half: int) -> set[int | str]:
        """Return every other question: half 0 begins with the first one, half 1 with the second."""
        questions = list(dict.fromkeys(turn.question_id for turn in self.recording.turns))
        return set(questions[half::2])

    def _half(self, half: int) -> list[RecordedTurn]:
        chosen = self.questions_of_half(half)
        return [turn for turn in self.recording.turns if turn.question_id in chosen]
