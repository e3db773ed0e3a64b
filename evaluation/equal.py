r"""Compare two answer files question by question: equal, or where they first part.

Lossless decoding means the same tokens, so this is the check behind every speed-up. Token ids are
compared where both files carry them, the text otherwise. Rows are matched by question id; a row that
one file lacks, a question that failed and one without an answer to compare are differences, never
skipped.

In half precision two almost equal logits may change places. With ``--model-path`` the model is loaded
and every first differing token is judged a tie or a BUG (``divergence.py``); ties alone are no error.

Run:
    python -m evaluation.equal --file-path data/demo/model_answer \
        --jsonfile1 vanilla.jsonl --jsonfile2 recycling.jsonl

Exit code: 0 equal (or ties alone, with ``--model-path``), 1 different, 2 not comparable.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evaluation.answers.rows import Row, is_failed, read_answers
from evaluation.defects import ERROR_TEXT
from evaluation.reporting.tables import json_line
from model.commands.command_line import OptionParser, UserError, run_command

TOKENS_AROUND = 5
CHARACTERS_AROUND = 30
EXAMPLES = """\
examples:
  python -m evaluation.equal --file-path data/demo/model_answer \\
      --jsonfile1 vanilla.jsonl --jsonfile2 recycling.jsonl
  python -m evaluation.equal --jsonfile1 run_1/vanilla.jsonl --jsonfile2 run_2/pld.jsonl
  python -m evaluation.equal --file-path data/demo/model_answer --model-path data/demo/model \\
      --jsonfile1 vanilla-bfloat16.jsonl --jsonfile2 recycling-bfloat16.jsonl

exit code: 0 equal (or ties alone, with --model-path), 1 different, 2 not comparable
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the answers to one question first part; indices count from 0.

    Attributes:
        question_id: The question.
        category: Its category.
        cause: What differs, in words.
        choice: Index of the choice, None if the whole row differs.
        turn: Index of the turn, None if the whole choice or row differs.
        unit: What ``position`` counts, ``token`` or ``character``; None without a position.
        position: First differing token or character in the turn.
        excerpts: The first file's and the second's tokens or characters around it.
        texts: The two texts around their first differing character, if token ids were compared.
        parts_at_tokens: Whether both have a token at the position: neither ends before it.
    """

    question_id: int | str
    category: str
    cause: str
    choice: int | None = None
    turn: int | None = None
    unit: str | None = None
    position: int | None = None
    excerpts: tuple[str, str] | None = None
    texts: tuple[str, str] | None = None
    parts_at_tokens: bool = False


@dataclass(slots=True)
class Comparison:
    """What comparing two files gave: counts, and one difference for each differing question."""

    num_questions: int
    num_turns_by_ids: int
    num_turns_by_text: int
    differences: list[Difference]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the verdict and one line of JSON; return 0 if the files are equal, else 1.

    Args:
        argv: The command line's words; None takes the process's own.

    Raises:
        UserError: A file is not an answer file.
    """
    options = _parse(argv)
    paths = [_locate(options.file_path, name) for name in (options.jsonfile1, options.jsonfile2)]
    rows = (read_answers(paths[0]), read_answers(paths[1]))
    comparison = compare(*rows)
    names = (str(paths[0]), str(paths[1]))
    print(_verdict(comparison, names))
    differences = comparison.differences
    judged: dict[str, Any] = {}
    is_harmless = not differences
    if options.model_path is not None and differences:
        from evaluation.checking.rerun import Replay, judge, judged_text  # imported late: torch

        replay = Replay((paths[0], paths[1]), rows, options.model_path, options.question_file)
        judged = judge(replay, differences, comparison.num_questions)
        print(judged_text(judged, differences))
        is_harmless = judged["ties"] == len(differences)
    report = {
        "equal": not differences,
        "jsonfile1": names[0],
        "jsonfile2": names[1],
        "questions": comparison.num_questions,
        "turns": comparison.num_turns_by_ids + comparison.num_turns_by_text,
        "turns_by_token_ids": comparison.num_turns_by_ids,
        "turns_by_text": comparison.num_turns_by_text,
        "differing_questions": len(differences),
        "differing_question_ids": [difference.question_id for difference in differences],
        "first_difference": asdict(differences[0]) if differences else None,
        "judged": judged,
    }
    print(json_line(report))
    return 0 if is_harmless else 1


def compare(rows: Sequence[Row], other_rows: Sequence[Row]) -> Comparison:
    """Compare two files' rows, in the first file's order and then what only the second holds.

    A turn counts as compared even if an earlier one of its question differs already.
    """
    by_id = {row["question_id"]: row for row in rows}
    other_by_id = {row["question_id"]: row for row in other_rows}
    question_ids = list(dict.fromkeys((*by_id, *other_by_id)))
    comparison = Comparison(len(question_ids), 0, 0, [])
    for question_id in question_ids:
        row, other = by_id.get(question_id), other_by_id.get(question_id)
        difference = _row_difference(row, other)
        if difference is None and row is not None and other is not None:
            difference = _answer_difference(row, other, comparison)
        if difference is not None:
            comparison.differences.append(difference)
    return comparison


def _row_difference(row: Row | None, other: Row | None) -> Difference | None:
    """What makes two rows differ before their answers are looked at."""
    present = row or other or {}
    cause = None
    if row is None or other is None:
        cause = f"the question is missing in the {'first' if row is None else 'second'} file"
    elif is_failed(row) or is_failed(other):
        failed = [word for word, it in (("first", row), ("second", other)) if is_failed(it)]
        errors = " and ".join(str(it["error"]) for it in (row, other) if it.get("error"))
        cause = f"the question failed in the {' and the '.join(failed)} file"
        cause += f" ({errors})" if errors else ""
    elif row["category"] != other["category"]:
        cause = f"the category is {row['category']!r} in the first, {other['category']!r} in the second file"
    elif len(row["choices"]) != len(other["choices"]):
        cause = f"{len(row['choices'])} choices against {len(other['choices'])}"
    return Difference(present["question_id"], present["category"], cause) if cause else None


def _answer_difference(row: Row, other: Row, comparison: Comparison) -> Difference | None:
    """The first difference in the answers; counts the turns that were compared."""
    first = None
    pairs = zip(row["choices"], other["choices"], strict=True)
    for choice_index, (choice, other_choice) in enumerate(pairs):
        where: dict[str, Any] = {
            "question_id": row["question_id"],
            "category": row["category"],
            "choice": choice_index,
        }
        texts, other_texts = _texts(choice), _texts(other_choice)
        if not texts and not other_texts:
            first = first or Difference(**where, cause="neither file has a turn to compare")
        if len(texts) != len(other_texts):
            cause = f"{len(texts)} turns against {len(other_texts)}"
            first = first or Difference(**where, cause=cause)
            continue
        has_ids = len(texts) == _num_id_turns(choice) == _num_id_turns(other_choice)
        for turn, (text, other_text) in enumerate(zip(texts, other_texts, strict=True)):
            if has_ids:
                comparison.num_turns_by_ids += 1
                ids, other_ids = choice["token_ids"][turn], other_choice["token_ids"][turn]
                found = _token_difference(ids, other_ids, (text, other_text))
            else:
                comparison.num_turns_by_text += 1
                found = _text_difference(text, other_text)
            if found:
                first = first or Difference(**where, turn=turn, **found)
    return first


def _texts(choice: dict[str, Any]) -> list[str]:
    """The text of every turn; empty ones where a file has token ids alone."""
    texts: list[str] = choice.get("turns", [])
    return texts or [""] * _num_id_turns(choice)


def _num_id_turns(choice: dict[str, Any]) -> int:
    return len(choice.get("token_ids") or [])


def _token_difference(
    ids: list[int], other_ids: list[int], texts: tuple[str, str]
) -> dict[str, Any] | None:
    if ids == other_ids:
        return None
    position = _first_difference(ids, other_ids)
    place = _first_difference(*texts)
    return {
        "cause": "tokens differ",
        "unit": "token",
        "position": position,
        "excerpts": (_tokens_around(ids, position), _tokens_around(other_ids, position)),
        "texts": (_text_around(texts[0], place), _text_around(texts[1], place)),
        "parts_at_tokens": position < min(len(ids), len(other_ids)),
    }


def _text_difference(text: str, other_text: str) -> dict[str, Any] | None:
    if text == other_text == ERROR_TEXT:
        return {"cause": f"the turn is {ERROR_TEXT!r} in both files: it raised an error"}
    if text == other_text:
        return None
    position = _first_difference(text, other_text)
    return {
        "cause": "texts differ",
        "unit": "character",
        "position": position,
        "excerpts": (_text_around(text, position), _text_around(other_text, position)),
    }


def _first_difference(values: Sequence[Any], other_values: Sequence[Any]) -> int:
    """Index of the first differing element; the shorter length if one is a prefix of the other."""
    pairs = enumerate(zip(values, other_values, strict=False))
    shorter = min(len(values), len(other_values))
    return next((index for index, (one, other) in pairs if one != other), shorter)


def _tokens_around(ids: list[int], position: int) -> str:
    start = max(0, position - TOKENS_AROUND)
    end = position + 1 + TOKENS_AROUND
    words = [
        f"[{token}]" if start + i == position else str(token)
        for i, token in enumerate(ids[start:end])
    ]
    if position >= len(ids):
        words.append("[end]")
    return " ".join(["..."] * (start > 0) + words + ["..."] * (end < len(ids)))


def _text_around(text: str, position: int) -> str:
    start = max(0, position - CHARACTERS_AROUND)
    end = position + 1 + CHARACTERS_AROUND
    before, after = repr(text[start:position]), repr(text[position:end])
    here = after if position < len(text) else "[end]"
    return f"{'... ' * (start > 0)}{before} then {here}{' ...' * (end < len(text))}"


def _verdict(comparison: Comparison, names: tuple[str, str]) -> str:
    num_turns = comparison.num_turns_by_ids + comparison.num_turns_by_text
    if not comparison.differences:
        return (
            f"Equal: {comparison.num_questions} questions, {num_turns} turns "
            f"({comparison.num_turns_by_ids} by token ids, {comparison.num_turns_by_text} by text)"
        )
    first = comparison.differences[0]
    place = [f"question {first.question_id} ({first.category})"]
    for name in ("choice", "turn"):
        if (index := getattr(first, name)) is not None:
            place.append(f"{name} {index}")
    if first.unit is not None:
        place.append(f"{first.unit} {first.position}")
    lines = [
        f"Not equal: {len(comparison.differences)} of {comparison.num_questions} questions differ",
        f"First difference: {', '.join(place)} (counted from 0): {first.cause}",
    ]
    for label, excerpts in ((first.unit, first.excerpts), ("text", first.texts)):
        for name, excerpt in zip(names, excerpts or (), strict=False):
            lines.append(f"  {label} in {name}: {excerpt}")
    return "\n".join(lines)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(
        prog="python -m evaluation.equal",
        description="Say whether two answer files hold the same answers, and where they first part.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--file-path", metavar="DIR", help="folder of the two files (default: here)"
    )
    for number in (1, 2):
        parser.add_argument(
            f"--jsonfile{number}", required=True, metavar="FILE", help="name in DIR, or a path"
        )
    parser.add_argument(
        "--model-path",
        metavar="MODEL",
        help="load this model, the one that answered, and judge every difference: tie or BUG",
    )
    parser.add_argument(
        "--question-file",
        metavar="FILE",
        help="the questions that were answered (default: those of the sidecar's benchmark)",
    )
    options = parser.parse_args(argv)
    if options.question_file is not None and options.model_path is None:
        raise UserError("question_file: got without --model-path; leave it out, or give both")
    if options.file_path is not None and not Path(options.file_path).is_dir():
        raise UserError(f"file_path: got {options.file_path}; allowed: a folder that is there")
    return options


def _locate(folder: str | None, name: str) -> Path:
    """An answer file by its name in the folder; by its own path if that is absolute or none is given."""
    path = Path(folder or ".") / name
    if not path.is_file():
        raise UserError(f"no answer file {path}; run an inference command first")
    return path


if __name__ == "__main__":
    run_command(main)
