"""Judge where a server's answers begin to differ from another file's: by the model that both say they run.

The prompts are rebuilt from the questions and the answers before, by the tokenizer's chat template, and must have
the length that was recorded. Tokens are those of the files; where a server sent none, its text is tokenised again,
and of all tokens that continue the text in the same way the likeliest counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from evaluation.answers.differences import Difference
from evaluation.answers.record import RunRecord
from evaluation.answers.row import AnswerRow, Choice
from evaluation.checking.rerun import TurnKey
from evaluation.checking.tie_or_bug import Judge, Judgement
from evaluation.questions.conversation import Message, asked_ids, choose_conversation
from evaluation.questions.questions import Question, load_questions, question_file_of
from model.commands.command_line import UserError, user_errors
from model.commands.files import file_hash
from model.commands.loading import check_model, load_target
from model.commands.model_options import ModelOptions
from model.engine.support import eos_ids_of

# Conditions that the two files must share.
SHARED = ("question_file_sha256", "temperature", "repetition_penalty", "stop", "system_prompt")
# Characters of the longest token that is looked for in a text.
LONGEST_TOKEN = 24


class _Text(NamedTuple):
    token_ids: list[int]
    others: list[int]  # that may stand for the first differing one


class ServedReplay:
    """Two answer files of which a server wrote one or both, with the model that judges them.

    Args:
        paths: the two answer files.
        rows: their rows.
        options: the model, and where it runs; its dtype is the servers', as far as is known.
        question_file: the questions; None takes the sidecar's benchmark.

    Raises:
        UserError: if the files are not of equal questions, were sampled, or questions or model are missing.
    """

    def __init__(
        self,
        paths: tuple[Path, Path],
        rows: tuple[Sequence[AnswerRow], Sequence[AnswerRow]],
        options: ModelOptions,
        question_file: str | None,
    ) -> None:
        self._questions, record = questions_of(paths, question_file)
        self._rows = tuple({row.question_id: row for row in side} for side in rows)
        model = check_model(options)
        self._conversation = choose_conversation("tokenizer", options.model_path, model.tokenizer)
        self._tokenizer = model.tokenizer
        target = load_target(replace(options, kernels="off"), model)
        self._eos_ids = sorted(eos_ids_of(target.model, model.tokenizer))
        self._judge = Judge(target, record["repetition_penalty"])

    def can_judge(self, difference: Difference) -> bool:
        """Whether two tokens stand against each other: of token ids, or of a text that both write."""
        is_text = difference.unit == "character" and difference.cause == "texts differ"
        return difference.parts_at_tokens or is_text

    def verdicts(self, places: Sequence[TurnKey]) -> list[Judgement]:
        """Judge the answers that differ at these places, after measuring the noise on texts of the first file."""
        self._judge.measure_noise_on(self._plain_texts(places))
        return [self._verdict(place) for place in places]

    def _plain_texts(self, places: Sequence[TurnKey]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield texts of the first file: those that differ, then others."""
        others = [(key, 0, 0) for key, row in self._rows[0].items() if row.choices]
        for place in dict.fromkeys((*places, *others)):
            choice = self._choice(0, place)
            ids = choice.token_ids or [self._tokens(text) for text in choice.turns]
            if place[2] < len(ids) and ids[place[2]]:
                yield self._prompt(place), ids[place[2]]

    def _verdict(self, place: TurnKey) -> Judgement:
        first, second = self._texts(place)
        with user_errors():
            return self._judge.judge_served(
                self._prompt(place),
                (first.token_ids, second.token_ids),
                (first.others, second.others),
            )

    def _choice(self, side: int, place: TurnKey) -> Choice:
        question_id, choice_index, _ = place
        return self._rows[side][question_id].choices[choice_index]

    def _prompt(self, place: TurnKey) -> list[int]:
        question_id, _, turn = place
        question = self._questions[question_id]
        said = self._choice(0, place).turns[:turn]
        history = [Message(*pair) for pair in zip(question.turns, said, strict=False)]
        prompt_ids = asked_ids(self._conversation, question, turn, history)
        for side in (0, 1):
            recorded = self._choice(side, place).prompt_length(turn)
            if recorded not in (None, len(prompt_ids)):
                raise UserError(
                    f"model_path: question {question_id!r}, turn {turn}: the prompt has {len(prompt_ids)} tokens "
                    f"by this model's chat template, the answers say {recorded}; give the served model"
                )
        return prompt_ids

    def _texts(self, place: TurnKey) -> tuple[_Text, _Text]:
        choices = [self._choice(side, place) for side in (0, 1)]
        turn = place[2]
        if all(turn < len(choice.token_ids) for choice in choices):
            one, other = (_Text(choice.token_ids[turn], []) for choice in choices)
            return one, other
        texts = [choice.turns[turn] for choice in choices]
        ids = [self._tokens(text) for text in texts]
        pairs = enumerate(zip(*ids, strict=False))
        shorter = min(map(len, ids))
        position = next((place for place, (one, other) in pairs if one != other), shorter)
        begin = len(self._tokenizer.decode(ids[0][:position]))
        first, second = (
            self._from_text(text, tokens, position, begin)
            for text, tokens in zip(texts, ids, strict=True)
        )
        return first, second

    def _from_text(self, text: str, token_ids: list[int], position: int, begin: int) -> _Text:
        if position == len(token_ids):  # it ended here
            return _Text([*token_ids, *self._eos_ids[:1]], self._eos_ids)
        pieces = (text[begin : begin + size] for size in range(1, LONGEST_TOKEN))
        found = [self._tokens(piece) for piece in dict.fromkeys(pieces) if piece]
        return _Text(token_ids, [ids[0] for ids in found if len(ids) == 1])

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids


def questions_of(
    paths: tuple[Path, Path], question_file: str | None
) -> tuple[dict[int | str, Question], dict[str, Any]]:
    """Return the questions that two files answer, and the record of the first with its defaults.

    Raises:
        UserError: if the files are not of equal questions, were sampled, or the questions are missing.
    """
    records = [RunRecord.read(path).with_defaults() for path in paths]
    for key in SHARED:
        values = [record.get(key) for record in records]
        is_missing = values[0] is None and key != "system_prompt"
        if values[0] != values[1] or is_missing:
            raise UserError(
                f"{key}: got {values[0]!r} in {paths[0]}, {values[1]!r} in {paths[1]}; allowed: answers of "
                "commands of this project to equal questions"
            )
    if records[0]["temperature"] > 0:
        raise UserError("temperature: these answers were sampled; allowed: greedy ones")
    bench = next((one["bench_name"] for one in records if one.get("bench_name")), "")
    file = question_file_of(bench, question_file)
    if file_hash(file) != records[0]["question_file_sha256"]:
        raise UserError(
            f"question_file: {file} is not the one that was answered; give the run's own"
        )
    found = load_questions(file, system_prompt=records[0]["system_prompt"])
    return {question.question_id: question for question in found}, records[0]
