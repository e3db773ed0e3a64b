"""Judge the differences between two answer files: the model is loaded, and the texts are replayed.

The sidecars say how each file was made: benchmark, template, dtype, method and its options. Prompts
are rebuilt from them, and must have the length that the answers recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from evaluation.answers.differences import Difference
from evaluation.answers.provenance import check_weights
from evaluation.answers.record import UNKNOWN, RunRecord, Use, keys
from evaluation.answers.row import AnswerRow
from evaluation.checking.tie_or_bug import Judge, Judgement
from evaluation.questions.conversation import (
    Conversation,
    Message,
    asked_ids,
    choose_conversation,
)
from evaluation.questions.questions import Question, load_questions, question_file_of
from evaluation.scoring.intervals import proportion_interval
from model.commands.command_line import UserError, user_errors
from model.commands.files import file_hash
from model.commands.loading import check_model, load_target
from model.commands.matrix_file import make_drafter
from model.commands.model_options import ModelOptions
from model.engine.drafter import Drafter
from model.engine.target import TargetModel
from model.methods import find_method

# Question, choice and turn.
TurnKey = tuple[int | str, int, int]


class Replay:
    """Two answer files, with all that is needed to judge their differences.

    Args:
        paths: the two answer files; the first is plain decoding's, or the one that counts as right.
        options: the model that both were made with, and where it runs; the dtype is the sidecar's.
        question_file: the questions; None takes the sidecar's benchmark.

    Raises:
        UserError: if a sidecar lacks a condition, the files are not of equal runs, were sampled, or the
            questions or the model are missing.
    """

    def __init__(
        self,
        paths: tuple[Path, Path],
        rows: tuple[Sequence[AnswerRow], Sequence[AnswerRow]],
        options: ModelOptions,
        question_file: str | None,
    ) -> None:
        metas = (_meta(paths[0]), _meta(paths[1]))
        for key in keys(Use.EQUAL):
            if metas[0][key] != metas[1][key]:
                raise UserError(
                    f"model_path: {paths[0]} has {key} {metas[0][key]!r}, {paths[1]} "
                    f"{metas[1][key]!r}; allowed: answers of equal runs"
                )
        if metas[0]["temperature"] > 0:
            raise UserError(
                "model_path: these answers were sampled; allowed: greedy ones, whose first "
                "difference can be judged by two logits"
            )
        self._questions = _questions(metas[0], question_file)
        self._rows = tuple({row.question_id: row for row in side} for side in rows)
        with user_errors():
            weights = metas[0].get("weights") or options.weights
            options = replace(options, dtype=metas[0]["dtype"], weights=weights)
        model = check_model(options)
        fingerprint = metas[0]["model_fingerprint"]
        check_weights(
            options.model_path, model.hf_config, fingerprint, "the answers are", "give that model"
        )
        self._conversation: Conversation = choose_conversation(
            metas[0]["conv_template"], options.model_path, model.tokenizer
        )
        self._target = load_target(options, model)
        self._judge = Judge(self._target, metas[0]["repetition_penalty"])
        self._drafters = (_drafter(metas[0], self._target), _drafter(metas[1], self._target))

    def can_judge(self, difference: Difference) -> bool:
        return difference.parts_at_tokens

    def verdicts(self, places: Sequence[TurnKey]) -> list[Judgement]:
        """Judge the answers that differ at these places, after measuring the noise."""
        if not self._judge.is_exact:
            self._judge.measure_noise_on(self._plain_texts(places))
        return [self._verdict(place) for place in places]

    def _verdict(self, place: TurnKey) -> Judgement:
        prompt_ids, first = self._text(0, place)
        _, second = self._text(1, place)
        return self._judge.judge(prompt_ids, (first, second), self._drafters)

    def _plain_texts(self, places: Sequence[TurnKey]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield texts of the first file: those that differ, then others."""
        for place in places:
            yield self._text(0, place)
        for question_id, row in self._rows[0].items():
            if question_id not in {place[0] for place in places} and row.choices:
                yield self._text(0, (question_id, 0, 0))

    def _text(self, side: int, place: TurnKey) -> tuple[list[int], list[int]]:
        question_id, choice_index, turn = place
        if question_id not in self._questions:
            raise UserError(f"question_file: has no question {question_id!r}; give the run's own")
        question = self._questions[question_id]
        choice = self._rows[side][question_id].choices[choice_index]
        texts = [self._conversation.text(ids) for ids in choice.token_ids[:turn]]
        history = [Message(*pair) for pair in zip(question.turns, texts, strict=False)]
        prompt_ids = asked_ids(self._conversation, question, turn, history)
        recorded = choice.prompt_length(turn)
        if len(prompt_ids) != recorded:
            raise UserError(
                f"model_path: question {question_id!r}, turn {turn}: the prompt has "
                f"{len(prompt_ids)} tokens, the answers say {recorded}; give the run's own model"
            )
        return prompt_ids, choice.token_ids[turn]


class Verdict(Protocol):
    """A judgement of a first difference, a dataclass that reads as a line."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def is_tie(self) -> bool: ...


class FileJudge(Protocol):
    """Judges where two answer files begin to differ."""

    def can_judge(self, difference: Difference) -> bool:
        """Whether two tokens stand against each other there."""
        ...

    def verdicts(self, places: Sequence[TurnKey]) -> Sequence[Verdict]: ...


def judge(
    replay: FileJudge, differences: Sequence[Difference], num_questions: int
) -> dict[str, Any]:
    """Judge every first difference, at most one a question, with rates over the questions compared."""
    # Answers that differ in anything but a token have no two logits to compare.
    parted = [it for it in differences if replay.can_judge(it)]
    verdicts = replay.verdicts([(it.question_id, it.choice or 0, it.turn or 0) for it in parted])
    num_ties = sum(verdict.is_tie for verdict in verdicts)
    num_others = len(differences) - num_ties
    return {
        "ties": num_ties,
        "bugs_and_others": num_others,
        "tie_rate_interval": proportion_interval(num_ties, num_questions),
        "bug_rate_interval": proportion_interval(num_others, num_questions),
        "verdicts": [
            {"question_id": it.question_id, "turn": it.turn} | asdict(verdict)
            for it, verdict in zip(parted, verdicts, strict=True)
        ],
        "texts": [
            f"question {it.question_id}, turn {it.turn}, {it.unit} {it.position}: {verdict}"
            for it, verdict in zip(parted, verdicts, strict=True)
        ],
        "not_judged": [
            f"question {it.question_id}: not judged: {it.cause}"
            for it in differences
            if it not in parted
        ],
        "questions": num_questions,
    }


def judged_text(judged: dict[str, Any]) -> str:
    lines = [*judged["texts"], *judged["not_judged"]]
    for name, key, rate in (
        ("ties", "ties", "tie_rate_interval"),
        ("bugs and other differences", "bugs_and_others", "bug_rate_interval"),
    ):
        low, high = judged[rate]
        num_questions = judged["questions"]
        lines.append(
            f"{judged[key]} {name} in {num_questions} questions: "
            f"{100 * judged[key] / num_questions:.1f}%, 95% [{100 * low:.1f}%, {100 * high:.1f}%]"
        )
    return "\n".join(lines)


def _meta(path: Path) -> Mapping[str, Any]:
    meta = RunRecord.read(path).with_defaults()
    missing = [key for key in keys(Use.NEEDED) if meta.get(key, UNKNOWN) == UNKNOWN]
    if missing:
        raise UserError(
            f"model_path: the sidecar of {path} has no {missing[0]!r}; allowed: answers of an "
            "inference command of this project"
        )
    return meta


def _questions(meta: Mapping[str, Any], question_file: str | None) -> dict[int | str, Question]:
    file = question_file_of(meta["bench_name"], question_file)
    questions = {
        question.question_id: question
        for question in load_questions(file, system_prompt=meta["system_prompt"])
    }
    if file_hash(file) != meta["question_file_sha256"]:
        raise UserError(
            f"question_file: {file} is not the one that was answered; give the run's own"
        )
    return questions


def _drafter(meta: Mapping[str, Any], target: TargetModel) -> Drafter:
    """Return the method of a sidecar with its options and an empty memory."""
    options = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in (meta.get("options") or {}).items()
    }
    if ":" in str(meta["method"]):  # a file of somebody else's says what to import
        raise UserError(
            f"model_path: the answers are of {meta['method']}, a class that only its path names; allowed: "
            "methods with a name; register the class in the entry points of its package"
        )
    try:
        method = find_method(meta["method"])
        config = method.config_class(**options)
    except (TypeError, ValueError) as error:
        raise UserError(f"model_path: the method of the answers cannot be made: {error}") from None
    return make_drafter(method, config, target.vocab_size, target.device, {})
