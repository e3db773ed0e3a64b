"""Methods answer a trace's questions through the one loop: with the model's acceptance lengths, and times by costs.

Answers are checked: a method under which the loop writes anything but the recorded answer would be a bug, of the
trace or of the method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from evaluation.answers.row import AnswerRow, Choice, Turn
from evaluation.inference.command import participant_of
from evaluation.inference.method import turn_of
from evaluation.inference.plan import Participant
from evaluation.questions.questions import Question
from evaluation.replay.costs import StepCosts
from evaluation.replay.target import ReplayTarget
from evaluation.replay.trace import RECORD_AGAIN, RecordedQuestion, RecordedTurn, Source
from model.backends.target import TargetModel
from model.budget.paced import CostAwareDrafter
from model.commands.command_line import UserError
from model.commands.loading import make_drafter
from model.engine.drafter import Drafter
from model.engine.loop import generate
from model.engine.step import StepRecord
from model.methods import Method


def replayable(words: str) -> Participant:
    """Return the method of these words, spelled as for its inference command; a `UserError` if it is none."""
    participant = participant_of(words)
    if not isinstance(participant.method, Method):
        raise UserError(f"methods: got {words!r}, which is no method of ours; allowed: methods")
    return participant


def check_replayable(drafter: Drafter, words: str, source: Source, has_costs: bool) -> None:
    """Raise UserError if a trace cannot serve a drafter."""
    if isinstance(drafter, CostAwareDrafter) and drafter.wants_costs and not has_costs:
        raise UserError(
            f"methods: {words!r} chooses its trees by what a step costs; give --costs FILE, or a fixed number of "
            "nodes or tree"
        )
    if drafter.needs.hidden_layers or drafter.needs.probes:
        what = "hidden states, as" if drafter.needs.hidden_layers else "masks of its own, as"
        raise UserError(
            f"methods: {words!r} needs {what} no trace has; give methods that draft from tokens and logits alone"
        )
    if drafter.needs.num_candidates > source.num_likeliest:
        raise UserError(
            f"methods: {words!r} asks for {drafter.needs.num_candidates} tokens of a row; the trace holds "
            f"{source.num_likeliest}; record with a larger --num-likeliest"
        )


@dataclass(slots=True)
class Counts:
    """What a method's steps of many turns add up to."""

    tokens: int = 0
    steps: int = 0
    nodes: int = 0  # verified, roots included
    unrecorded_steps: int = 0  # with nodes that were not recorded
    seconds: float = 0.0  # by the costs
    accept_lengths: list[int] = field(default_factory=list)

    @property
    def mat(self) -> float:
        return self.tokens / self.steps

    def add(self, turn: Turn, num_unrecorded: Sequence[int]) -> None:
        self.tokens += len(turn.token_ids)
        self.steps += len(turn.accept_lengths or ())
        self.nodes += sum(1 + count for count in turn.details["step_nodes"])
        # Steps past the limit, as of a published code, are unseen.
        counted = zip(turn.accept_lengths or (), num_unrecorded, strict=False)
        self.unrecorded_steps += sum(count > 0 for _, count in counted)
        self.seconds += turn.wall_time
        self.accept_lengths += turn.accept_lengths or ()


class Replay:
    """A method that answers a trace's questions in their order; while one is recorded, `live` is asked for more."""

    def __init__(
        self,
        source: Source,
        participant: Participant,
        costs: StepCosts | None = None,
        live: TargetModel | None = None,
    ) -> None:
        assert isinstance(participant.method, Method), "as of `replayable`"
        self.participant, self._costs = participant, costs
        self._drafter = make_drafter(
            participant.method, participant.config, source.vocab_size, torch.device("cpu"), {}
        )
        check_replayable(self._drafter, participant.words, source, costs is not None)
        if isinstance(self._drafter, CostAwareDrafter) and costs is not None:
            self._drafter.costs = costs.model().fresh(self._drafter.draft_costs())
        self.target = ReplayTarget(source, live, costs)
        needs = self._drafter.needs
        self.target.reads_rejected, self.target.reads_samples = (
            needs.reads_rejected,
            needs.logit_samples,
        )
        self.target.num_read = max(1, needs.num_candidates)
        self.keeps_memory = self._drafter.is_hot or self._drafter.has_unsaved_memory
        self.counts = Counts()

    def answer(self, question: RecordedQuestion) -> AnswerRow:
        """Answer a question; a method with a cold start forgets before it."""
        self.target.question = question
        if self._drafter.needs.cold_start:
            self._drafter.reset()
        turns = [self._answer_turn(question, turn) for turn in question.turns]
        texts = [turn.text for turn in question.turns]
        asked = Question(question.question_id, question.category, ())
        name = self.participant.label
        return AnswerRow.of_question(asked, name, [Choice.of_turns(0, texts, turns)], None)

    def _answer_turn(self, question: RecordedQuestion, turn: RecordedTurn) -> Turn:
        source, target = self.target.source, self.target
        target.num_unrecorded = []
        options: dict[str, Any] = {
            "max_new_tokens": source.max_new_tokens,
            "eos_ids": source.eos_ids,
        }
        found = generate(target, self._drafter, turn.prompt_ids, **options)
        if found.token_ids != turn.answer_ids:
            raise UserError(
                f"trace: question {question.question_id!r}: {self.participant.words} gets another answer than is "
                f"recorded: the trace is damaged; {RECORD_AGAIN}"
            )
        steps = found.steps
        if self._costs is not None:
            learns = self._drafter.needs.wants_prompt_logits(source.head_share)
            steps = predicted(steps, len(turn.prompt_ids), self._costs, learns)
        seconds = sum(step.prefill_ns + step.step_ns for step in steps) / 1e9
        answer = turn_of(steps, len(turn.prompt_ids), seconds, seconds)
        self.counts.add(answer, target.num_unrecorded)
        return answer


def predicted(
    steps: Sequence[StepRecord], num_prompt: int, costs: StepCosts, learns_from_prompt: bool
) -> list[StepRecord]:
    """Return steps with a machine's times: passes and what is beside them by its costs, the rest as here."""
    found, context = [], num_prompt - 1
    prefill_ns = int(costs.of_prompt(context, learns_from_prompt) * 1e6)
    for step in steps:
        forward_ns = int(costs.of_pass(step.num_nodes, context) * 1e6)
        keep_ns = int(costs.beside_pass * 1e6)
        times: dict[str, Any] = {"forward_ns": forward_ns, "verify_ns": 0, "keep_ns": keep_ns}
        found.append(replace(step, prefill_ns=prefill_ns, **times))
        context += len(step.tokens)
        prefill_ns = 0
    return found
