"""Drafters scored on a recording: acceptance lengths, nodes, and their means.

The answers are checked: a drafter under which the loop writes anything but the recorded greedy
answer is a bug, and is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import accumulate, takewhile
from typing import NamedTuple

import torch

from evaluation.inference.command import participant_of
from model.budget.paced import CostAwareDrafter
from model.commands.command_line import UserError
from model.commands.loading import make_drafter
from model.engine.drafter import Drafter
from model.engine.loop import generate
from model.engine.step import Generation
from model.engine.verification import InvalidLogitsError
from model.methods import Method
from scripts.demo_model.corpus import find_loop
from scripts.replay.recording import RecordedTurn
from scripts.replay.target import MissingRowError, ReplayTarget


class TurnScore(NamedTuple):
    """The steps of a drafter on one turn."""

    turn: RecordedTurn
    accept_lengths: tuple[int, ...]  # tokens emitted by each step, bonus token included
    num_nodes: tuple[int, ...]  # nodes verified in each step, root included

    @property
    def num_steps_before_loop(self) -> int:
        """Steps that begin before the answer is seen to repeat itself."""
        loop = find_loop(self.turn.answer_ids)
        begins = accumulate(self.accept_lengths, initial=0)
        before = takewhile(lambda begin: loop is None or begin < loop, begins)
        return min(sum(1 for _ in before), len(self.accept_lengths))


class Figures(NamedTuple):
    """Means over the steps of many turns."""

    mat: float  # mean accepted tokens a step, bonus token included
    mat_before_loops: float  # the same on the part of every answer before it loops
    nodes: float  # mean nodes a step, root included


def figures(scores: Sequence[TurnScore]) -> Figures:
    lengths = [length for score in scores for length in score.accept_lengths]
    early = [
        length for score in scores for length in score.accept_lengths[: score.num_steps_before_loop]
    ]
    nodes = [count for score in scores for count in score.num_nodes]
    return Figures(sum(lengths) / len(lengths), sum(early) / len(early), sum(nodes) / len(nodes))


def drafter_from(words: str, vocab_size: int) -> Drafter:
    """Return the drafter of a method with options, spelled as for its inference command.

    Raises:
        UserError: if method or options are unknown, or the options are not allowed.
    """
    participant = participant_of(words)
    if not isinstance(participant.method, Method):
        raise UserError(f"{words!r}: is not a drafter; allowed: methods")
    return make_drafter(participant.method, participant.config, vocab_size, torch.device("cpu"), {})


def check_replayable(drafter: Drafter, words: str, top_k: int) -> None:
    """Raise UserError if a recording cannot serve a drafter exactly."""
    if isinstance(drafter, CostAwareDrafter) and drafter.wants_costs:
        is_budget = getattr(drafter.config, "budget", None) == "auto"
        fixed = "--budget fixed" if is_budget else "a tree template as --tree-version"
        raise UserError(
            f"{words!r}: its trees depend on times measured on this device; give {fixed}"
        )
    if drafter.needs.hidden_layers:
        raise UserError(
            f"{words!r}: reads the model's hidden states, which are not recorded; give methods without "
            "trained heads"
        )
    if drafter.needs.probes:
        raise UserError(
            f"{words!r}: appends masks to the pass, which are not recorded; give methods that draft only tokens"
        )
    if drafter.needs.num_candidates > top_k:
        raise UserError(
            f"{words!r}: asks for {drafter.needs.num_candidates} tokens of a row; the recording holds {top_k}; "
            "record with a larger --top-k"
        )


def score(target: ReplayTarget, drafter: Drafter, turns: Iterable[RecordedTurn]) -> list[TurnScore]:
    """Run a drafter over turns: a hot one goes on from turn to turn, a cold one forgets before every question.

    Raises:
        UserError: if the recording lacks rows and there is no model to ask.
    """
    source = target.recording.source
    target.reads_rejected = drafter.needs.reads_rejected
    scores: list[TurnScore] = []
    for turn in turns:
        is_new = not scores or scores[-1].turn.question_id != turn.question_id
        if is_new and drafter.needs.cold_start:
            drafter.reset()
        answer: Generation | None = None
        with suppress(InvalidLogitsError):  # where the text has left the answer no row is known
            answer = replay(target, drafter, turn)
        if answer is None or tuple(answer.token_ids) != turn.answer_ids:
            raise RuntimeError(
                f"question {turn.question_id}: {type(drafter).__name__} changes the text; "
                f"recorded: {source.dtype} answers of {source.model_path}"
            )
        counts = tuple(step.num_nodes for step in answer.steps)
        scores.append(TurnScore(turn, tuple(answer.accept_lengths), counts))
    return scores


def replay(target: ReplayTarget, drafter: Drafter, turn: RecordedTurn) -> Generation:
    """Answer one turn.

    Raises:
        UserError: if the recording lacks rows and there is no model to ask.
    """
    target.turn = turn
    source = target.recording.source
    try:
        return generate(
            target,
            drafter,
            turn.prompt_ids,
            max_new_tokens=source.max_new_tokens,
            eos_ids=source.eos_ids,
        )
    except MissingRowError as error:
        raise UserError(
            f"question {turn.question_id}: {error}; add --extend to ask the model ({source.model_path})"
        ) from error
