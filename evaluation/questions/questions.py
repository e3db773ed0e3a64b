"""Question files: Spec-Bench's JSONL and other programs' forms, checked before any model loads."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evaluation.questions.pinned_data import download_command
from evaluation.questions.trajectories import asked_places, text_of, todays_messages, todays_tools
from model.commands.command_line import UserError, first_line
from model.commands.files import check_file, parse_json, read_text

DATA_FOLDER = Path(__file__).resolve().parents[2] / "data"
# Spec-Bench has 1 MB; the whole file is held in memory.
MAX_BYTES = 2**30
# The category of questions and answers that have none.
UNCATEGORISED = "uncategorised"
# What SPEED-Bench has in place of texts that its owners' script fetches.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
FORMS = (
    "questions of Spec-Bench (question_id, category, turns), FastChat (text), HumanEval and MBPP (task_id, prompt "
    "or text), GSM8K (question, answer), ShareGPT (conversations), or OpenAI's messages"
)
Row = dict[str, Any]
# Names of the user in ShareGPT's `from`.
USERS = ("human", "user")


@dataclass(frozen=True, slots=True)
class Question:
    """One question: a conversation of one or more user turns, or a trajectory of messages.

    Of a trajectory every assistant message is a turn, asked after the messages before it as they were: what the
    model answers does not enter the next prompt. `turns` are then the texts before these.
    """

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    system: str | None = None  # system prompt; None: the template's own, if it has one
    # Of a trajectory: its messages in OpenAI's form, up to the last assistant's, and the tools it may call.
    messages: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    tools: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    # What is known of the answers (`questions.known`): fields of their requests, and a text for each turn.
    fields: dict[str, Any] = field(default_factory=dict, hash=False)
    predictions: tuple[str, ...] = ()

    def before(self, turn: int) -> list[dict[str, Any]]:
        """Return the messages of a trajectory before its turn's assistant message."""
        return list(self.messages[: asked_places(self.messages)[turn]])


def question_file_of(bench_name: str, given: str | None = None) -> Path:
    """Return the given question file, or that of a benchmark.

    A `UserError` if the name is not a plain folder name, or the file is missing; it says which command brings it.
    """
    if given:
        return Path(given)
    if not bench_name or Path(bench_name).name != bench_name or bench_name in (".", ".."):
        raise UserError(f"bench_name: got {bench_name!r}; allowed: the name of a folder in data/")
    file = DATA_FOLDER / bench_name / "question.jsonl"
    if file.is_file():
        return file
    command = download_command(bench_name)
    here = sorted(found.parent.name for found in DATA_FOLDER.glob("*/question.jsonl"))
    there = ", ".join(here) or "none"
    advice = f"run: {command}" if command else f"there are: {there}; or give --question-file"
    raise UserError(f"question file {file} does not exist; {advice}")


def category_map(texts: Sequence[str]) -> dict[str, str]:
    """Return the new names of categories from texts such as `OLD=NEW`, each once; a `UserError` of other texts."""
    found: dict[str, str] = {}
    for text in texts:
        old, _, new = text.partition("=")
        if not old or not new or old in found:
            raise UserError(
                f"category_map: got {text!r}; allowed: OLD=NEW, each category once, such as math=math_reasoning"
            )
        found[old] = new
    return found


def spread(questions: list[Question], count: int | None) -> list[Question]:
    """Return `count` questions evenly spread over a list, so that every category has its share; None: all."""
    if count is None or count >= len(questions):
        return questions
    return [
        questions[round(index * (len(questions) - 1) / max(1, count - 1))] for index in range(count)
    ]


def load_questions(
    file: Path,
    begin: int | None = None,
    end: int | None = None,
    count: int | None = None,
    system_prompt: str | None = None,
    renames: Sequence[str] = (),
) -> list[Question]:
    """Load questions.

    Args:
        file: JSON lines, a JSON list, or Parquet, of questions in one of `FORMS`, or in those of EAGLE and
            SPEED-Bench.
        begin: index of the first question; None: the file's first.
        end: index after the last question; None: the file's end.
        count: as many of these, evenly spread; None: all.
        system_prompt: of the questions that have none of their own.
        renames: new names of categories, such as `OLD=NEW`.

    Raises:
        UserError: naming file and line of the first mistake, or an empty selection.
    """
    for name, index in (("question_begin", begin), ("question_end", end)):
        if index is not None and index < 0:
            raise UserError(f"{name}: got {index}; allowed: 0 or more")
    renamed = category_map(renames)
    found: dict[int | str, Question] = {}
    num_empty = 0
    for place, (where, row) in enumerate(_rows(file), start=1):
        if not isinstance(row, dict):
            raise UserError(f"{where}: got {type(row).__name__}; allowed: a JSON object")
        form = _in_spec_bench_form(row, place, where)
        if form.get("turns") == [] and "conversations" in row:
            num_empty += 1
            continue
        question = _checked(form, where)
        if question.question_id in found:
            raise UserError(f"{where}: question_id {question.question_id!r} occurs twice")
        category = renamed.get(question.category, question.category)
        found[question.question_id] = replace(question, category=category)
    if num_empty:
        left_out = f"{num_empty} conversations without a message of the user are left out"
        print(f"question file {file}: {left_out}", file=sys.stderr)
    questions = list(found.values())
    if not questions:
        raise UserError(f"question file {file}: got an empty file; allowed: one JSON object a line")
    if system_prompt is not None and any(question.messages for question in questions):
        raise UserError(
            f"system_prompt: got it with trajectories in {file}, whose messages are asked as they are; leave it out"
        )
    selected = questions[begin:end]
    if not selected:
        raise UserError(
            f"question_begin {begin}, question_end {end}: select none of the {len(questions)} questions of {file}"
        )
    return [
        question if question.system is not None else replace(question, system=system_prompt)
        for question in spread(selected, count)
    ]


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a question file, each with its place for errors."""
    what = f"question file {file}"
    check_file(file, "question file", MAX_BYTES)
    with file.open("rb") as content:
        beginning = content.read(4)
    if beginning == b"PAR1":
        import pandas as pd  # imported late: JSON needs none of it

        try:
            frame = pd.read_parquet(file)
        except ImportError:
            raise UserError(
                f"{what}: is Parquet, which needs pyarrow; pip install pyarrow"
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"{what}: cannot be read as Parquet: {first_line(error)}") from error
        rows: list[Any] = json.loads(frame.to_json(orient="records"))
        yield from ((f"{what}, row {place}", row) for place, row in enumerate(rows, start=1))
        return
    if beginning.startswith(b"\x1f\x8b"):
        raise UserError(f"{what}: is packed with gzip; unpack it: gunzip {file.name}")
    text = read_text(file, "question file", MAX_BYTES)
    if text.lstrip().startswith("["):  # ShareGPT's files are one list
        rows = parse_json(text, f"{what}, line 1")
        yield from ((f"{what}, item {place}", row) for place, row in enumerate(rows, start=1))
        return
    # Not splitlines: JSON strings may hold U+2028 and other separators that it would cut at.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{what}, line {number}"
            yield where, parse_json(line, where)


def _checked(row: dict[str, Any], where: str) -> Question:
    for key in ("question_id", "category", "turns"):
        if key not in row:
            raise UserError(f"{where}: lacks the key {key!r}; allowed: {FORMS}")
    question_id, category, turns = row["question_id"], row["category"], row["turns"]
    if type(question_id) not in (int, str):
        raise UserError(
            f"{where}: question_id: got {question_id!r}; allowed: a whole number or a string"
        )
    if not isinstance(category, str):
        raise UserError(f"{where}: category: got {category!r}; allowed: a string")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise UserError(
            f"{where}: turns: got {str(turns)[:60]}; allowed: a list of one or more strings"
        )
    if any(turn.startswith(PLACEHOLDER) for turn in turns):
        raise UserError(
            f"{where}: got a placeholder; allowed: questions, which SPEED-Bench's own prepare_data.py puts "
            "in its place"
        )
    system = row.get("system")
    if not isinstance(system, str | None):
        raise UserError(f"{where}: system: got {str(system)[:60]}; allowed: a string, or none")
    messages, tools = (tuple(row.get(key) or ()) for key in ("messages", "tools"))
    found = Question(question_id, category or UNCATEGORISED, tuple(turns), system, messages, tools)
    return replace(found, fields=_fields(row, where), predictions=_predictions(row, where))


def _fields(row: Row, where: str) -> dict[str, Any]:
    """Return what a question says of its answers in fields of OpenAI's requests."""
    found = {name: row[name] for name in ("response_format", "tool_choice") if row.get(name)}
    form, choice = (found.get(name) for name in ("response_format", "tool_choice"))
    is_form = form is None or (
        isinstance(form, dict) and form.get("type") in ("text", "json_object")
    )
    if isinstance(form, dict) and form.get("type") == "json_schema":
        is_form = isinstance((form.get("json_schema") or {}).get("schema"), dict)
    named = (choice.get("function") or {}).get("name") if isinstance(choice, dict) else choice
    is_choice = choice is None or (isinstance(named, str) and bool(row.get("messages")))
    for name, is_right, allowed in (
        ("response_format", is_form, "text, json_object, or json_schema with a schema"),
        ("tool_choice", is_choice, "required, or a function, of trajectories with tools"),
    ):
        if not is_right:
            raise UserError(f"{where}: {name}: got {str(found[name])[:60]}; allowed: {allowed}")
    return found


def _predictions(row: Row, where: str) -> tuple[str, ...]:
    """Return the text that the answer to each turn resembles; none if the question has no `prediction`."""
    given = row.get("prediction") or ()
    texts = [given] if isinstance(given, str) else given
    is_list = isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts)
    if not is_list or (texts and len(texts) != len(row["turns"])):
        said = str(given)[:60]
        raise UserError(f"{where}: prediction: got {said}; allowed: a text for each of the turns")
    return tuple(texts)


def _in_spec_bench_form(row: Row, place: int, where: str) -> Row:
    """Return a question of another of `FORMS` in Spec-Bench's form, another row as it is.

    Of a conversation the user's messages are the turns, which may be none; `place` is its id if it has none. Of
    OpenAI's messages those before the assistant's are, or all of the user's where the assistant has none.
    """
    conversation, messages = row.get("conversations"), row.get("messages")
    if "turns" in row:
        return {key: value for key, value in row.items() if key not in ("messages", "tools")}
    if (
        isinstance(messages, list)
        and messages
        and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages)
    ):
        return _trajectory(row, todays_messages(messages, where), place, where)
    if isinstance(conversation, list) and all(isinstance(said, dict) for said in conversation):
        said = [(message.get("from"), message.get("value")) for message in conversation]
        return _conversation(row, said, place)
    if "task_id" in row and ("prompt" in row or "text" in row):
        text = row["prompt"] if "prompt" in row else row["text"]
        return {"question_id": row["task_id"], "category": "code", "turns": [text], **row}
    if "question" in row and "answer" in row:
        # Where Spec-Bench reports GSM8K's questions.
        task = "math_reasoning"
        return {"question_id": place, "category": task, "turns": [row["question"]], **row}
    if "text" in row:
        return {"turns": [row["text"]], **row}
    return row


def _trajectory(row: Row, messages: list[Row], place: int, where: str) -> Row:
    said = [(one["role"], text_of(one.get("content"))) for one in messages]
    asked = asked_places(messages)
    if not asked:
        rest = {key: value for key, value in row.items() if key not in ("messages", "tools")}
        return _conversation(rest, said, place)
    trajectory = {
        "turns": [said[at - 1][1] for at in asked],
        "messages": messages[: asked[-1] + 1],
        "tools": todays_tools(row.get("tools"), where),
    }
    return {"question_id": row.get("id", place), "category": "", **row, **trajectory}


def _conversation(row: Row, said: Sequence[tuple[Any, Any]], place: int) -> Row:
    """Return a question whose turns are what the user said; of each message the speaker and the text are given."""
    form = {
        "question_id": row.get("id", place),
        "category": "",
        "turns": [text for speaker, text in said if speaker in USERS],
        "system": next((text for speaker, text in said if speaker == "system"), None),
    }
    return {**form, **row}
