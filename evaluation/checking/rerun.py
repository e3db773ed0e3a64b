"""Judge the differences between two answer files: a model is loaded, and the texts are replayed.

The sidecars say how each file was made: benchmark, template, dtype, method and its options. Prompts
are rebuilt from them, and must have the length that the answers recorded.

Of a server's answers the prompts are those of the tokenizer's chat template, and the model is the one that all say
they run. Tokens are those of the files. Where a server sent none, its text is tokenised again, and of all tokens
that continue the text in the same way the likeliest counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

from evaluation.answers.differences import Difference, first_difference
from evaluation.answers.record import UNKNOWN, RunRecord, Use, check_weights, keys
from evaluation.answers.row import AnswerRow, Choice
from evaluation.checking.tie_or_bug import Judge, Judgement, Verdict
from evaluation.questions.conversation import Conversation, Message, asked_ids, choose_conversation
from evaluation.questions.questions import Question, load_questions, question_file_of
from evaluation.scoring.intervals import proportion_interval
from model.backends.proofs.support import eos_ids_of
from model.backends.target import TargetModel
from model.commands.command_line import UserError, user_errors
from model.commands.files import file_hash
from model.commands.loading import check_model, load_target, make_drafter
from model.commands.model_options import ModelOptions
from model.engine.drafter import Drafter
from model.methods import find_method

# Conditions that two files must share of which a server wrote one.
SHARED = ("question_file_sha256", "temperature", "repetition_penalty", "stop", "system_prompt")
# Characters of the longest token that is looked for in a text.
LONGEST_TOKEN = 24
# Question, choice and turn.
TurnKey: TypeAlias = tuple[int | str, int, int]
# Of two answer files; the first is plain decoding's, or the one that counts as right.
Paths: TypeAlias = tuple[Path, Path]
Rows: TypeAlias = tuple[Sequence[AnswerRow], Sequence[AnswerRow]]


class FileJudge:
    """Judges where two answer files begin to differ."""

    def __init__(self, rows: Rows, questions: dict[int | str, Question]) -> None:
        self._questions = questions
        self._rows = tuple({row.question_id: row for row in side} for side in rows)

    def can_judge(self, difference: Difference) -> bool:
        """Whether two tokens stand against each other there."""
        return difference.parts_at_tokens

    def verdicts(self, places: Sequence[TurnKey]) -> Sequence[Verdict]:
        """Judge the answers that differ at these places."""
        raise NotImplementedError

    def _choice(self, side: int, place: TurnKey) -> Choice:
        question_id, choice_index, _ = place
        return self._rows[side][question_id].choices[choice_index]


class ModelJudge(FileJudge):
    """Judges with the model that the answers are of: prompts are rebuilt, and the noise is plain decoding's."""

    _conversation: Conversation
    _judge: Judge
    # Whether rows may lack the prompt's length, which then is not compared.
    _may_lack_length = False

    def verdicts(self, places: Sequence[TurnKey]) -> list[Judgement]:
        """Judge the answers that differ at these places, after measuring the noise on texts of the first file."""
        self._judge.measure_noise_on(self._plain_texts(places))
        return [self._verdict(place) for place in places]

    def _plain_texts(self, places: Sequence[TurnKey]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield texts of the first file with their prompts: those that differ, then others."""
        raise NotImplementedError

    def _verdict(self, place: TurnKey) -> Judgement:
        raise NotImplementedError

    def _prompt(self, place: TurnKey) -> list[int]:
        """Return the prompt of a turn of the first file; a `UserError` if it was another one when it was asked."""
        question_id, choice_index, turn = place
        if question_id not in self._questions:
            raise UserError(f"question_file: has no question {question_id!r}; give the run's own")
        question = self._questions[question_id]
        said = self._choice(0, place).turns[:turn]
        history = [Message(*pair) for pair in zip(question.turns, said, strict=False)]
        prompt_ids = asked_ids(self._conversation, question, turn, history)
        for side in self._rows:
            choices = side[question_id].choices if question_id in side else ()
            for choice in choices[choice_index : choice_index + 1]:
                recorded = choice.prompt_length(turn)
                is_unknown = recorded is None and self._may_lack_length
                if recorded != len(prompt_ids) and not is_unknown:
                    raise UserError(
                        f"model_path: question {question_id!r}, turn {turn}: the prompt has {len(prompt_ids)} "
                        f"tokens, the answers say {recorded}; give the model that answered"
                    )
        return prompt_ids


class Replay(ModelJudge):
    """Two answer files of methods, with the model that both were made with; the dtype is the sidecar's.

    A `UserError` if a sidecar lacks a condition, the files are not of equal runs, were sampled, or the questions or
    the model are missing.
    """

    def __init__(
        self, paths: Paths, rows: Rows, options: ModelOptions, question_file: str | None
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
        super().__init__(rows, questions_of(metas[0], question_file))
        with user_errors():
            weights = metas[0].get("weights") or options.weights
            options = replace(options, dtype=metas[0]["dtype"], weights=weights)
        model = check_model(options)
        fingerprint = metas[0]["model_fingerprint"]
        check_weights(
            options.model_path, model.hf_config, fingerprint, "the answers are", "give that model"
        )
        self._conversation = choose_conversation(
            metas[0]["conv_template"], options.model_path, model.tokenizer
        )
        self._target = load_target(options, model)
        self._judge = Judge(self._target, metas[0]["repetition_penalty"])
        self._drafters = (_drafter(metas[0], self._target), _drafter(metas[1], self._target))

    def _plain_texts(self, places: Sequence[TurnKey]) -> Iterator[tuple[list[int], list[int]]]:
        if self._judge.is_exact:
            return  # there every difference is a bug, whatever the noise
        judged = {place[0] for place in places}
        others = [
            (key, 0, 0) for key, row in self._rows[0].items() if key not in judged and row.choices
        ]
        for place in (*places, *others):
            yield self._prompt(place), self._choice(0, place).token_ids[place[2]]

    def _verdict(self, place: TurnKey) -> Judgement:
        first, second = (self._choice(side, place).token_ids[place[2]] for side in (0, 1))
        return self._judge.judge(self._prompt(place), (first, second), self._drafters)


class ServedReplay(ModelJudge):
    """Two answer files of which a server wrote one or both, with the model that judges them.

    The dtype of the model's options is the servers', as far as is known. A `UserError` if the files are not of
    equal questions, were sampled, or questions or model are missing.
    """

    _may_lack_length = True  # not every server tells it

    def __init__(
        self, paths: Paths, rows: Rows, options: ModelOptions, question_file: str | None
    ) -> None:
        record = check_shared(paths)
        super().__init__(rows, questions_of(record, question_file))
        model = check_model(options)
        self._conversation = choose_conversation("tokenizer", options.model_path, model.tokenizer)
        self._tokenizer = model.tokenizer
        target = load_target(replace(options, kernels="off"), model)
        self._eos_ids = sorted(eos_ids_of(target.model, model.tokenizer))
        self._judge = Judge(target, record["repetition_penalty"])

    def can_judge(self, difference: Difference) -> bool:
        """Whether two tokens stand against each other, or two texts."""
        is_text = difference.unit == "character" and difference.cause == "texts differ"
        return difference.parts_at_tokens or is_text

    def _plain_texts(self, places: Sequence[TurnKey]) -> Iterator[tuple[list[int], list[int]]]:
        others = [(key, 0, 0) for key, row in self._rows[0].items() if row.choices]
        for place in dict.fromkeys((*places, *others)):
            choice = self._choice(0, place)
            ids = choice.token_ids or [self._tokens(text) for text in choice.turns]
            if place[2] < len(ids) and ids[place[2]]:
                yield self._prompt(place), ids[place[2]]

    def _verdict(self, place: TurnKey) -> Judgement:
        choices = [self._choice(side, place) for side in (0, 1)]
        turn = place[2]
        if all(turn < len(choice.token_ids) for choice in choices):
            texts = [choice.token_ids[turn] for choice in choices]
            others: list[list[int]] = [[], []]
        else:
            texts, others = self._tokenised([choice.turns[turn] for choice in choices])
        with user_errors():
            return self._judge.judge_served(
                self._prompt(place), (texts[0], texts[1]), (others[0], others[1])
            )

    def _tokenised(self, texts: Sequence[str]) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens of two texts, and of each others that may stand for its first differing one."""
        found = [self._tokens(text) for text in texts]
        position = first_difference(*found)
        begin = len(self._tokenizer.decode(found[0][:position]))
        others = []
        for text, token_ids in zip(texts, found, strict=True):
            if position == len(token_ids):  # it ended here
                token_ids += self._eos_ids[:1]
                others.append(self._eos_ids)
            else:
                pieces = (text[begin : begin + size] for size in range(1, LONGEST_TOKEN))
                ids = [self._tokens(piece) for piece in dict.fromkeys(pieces) if piece]
                others.append([one[0] for one in ids if len(one) == 1])
        return found, others

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids


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


def check_shared(paths: Paths) -> dict[str, Any]:
    """Return the first file's record with defaults; a `UserError` if questions differ or answers were sampled."""
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
    return records[0] | {"bench_name": bench}


def questions_of(record: Mapping[str, Any], question_file: str | None) -> dict[int | str, Question]:
    """Return the questions that a record's file answers (None: its benchmark's), or raise a `UserError`."""
    file = question_file_of(record["bench_name"], question_file)
    if file_hash(file) != record["question_file_sha256"]:
        raise UserError(
            f"question_file: {file} is not the one that was answered; give the run's own"
        )
    found = load_questions(file, system_prompt=record["system_prompt"])
    return {question.question_id: question for question in found}


def _meta(path: Path) -> Mapping[str, Any]:
    meta = RunRecord.read(path).with_defaults()
    missing = [key for key in keys(Use.NEEDED) if meta.get(key, UNKNOWN) == UNKNOWN]
    if missing:
        raise UserError(
            f"model_path: the sidecar of {path} has no {missing[0]!r}; allowed: answers of an "
            "inference command of this project"
        )
    return meta


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
