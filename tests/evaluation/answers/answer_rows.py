"""Hand-made and random answer rows for the tests of the reports."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evaluation.answers.row import AnswerRow

# Tests take rows apart and change them, which a dict makes short.
Row = dict[str, Any]

CATEGORIES = (
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
    *("translation", "summarization", "qa", "math_reasoning", "rag"),
)


def make_row(
    question_id: int | str,
    category: str,
    accept_lengths: list[int],
    seconds: float,
    turns: list[str] | None = None,
    **choice_keys: Any,
) -> Row:
    """Return one answer of one turn (or the given ones) whose counters fit its steps."""
    new_tokens = sum(accept_lengths)
    choice = {
        "index": 0,
        "turns": [f"text of {new_tokens} tokens"] if turns is None else turns,
        "decoding_steps": [len(accept_lengths)],
        "new_tokens": [new_tokens],
        "wall_time": [seconds],
        "accept_lengths": accept_lengths,
    }
    return {
        "question_id": question_id,
        "category": category,
        "answer_id": f"answer-{question_id}",
        "model_id": "tiny-method-float32",
        "choices": [choice | choice_keys],
        "tstamp": 0.0,
    }


def failed_row(question_id: int | str, category: str, error: str = "out of memory") -> Row:
    """Return the row of a question that failed."""
    return make_row(question_id, category, [1], 1.0) | {"choices": [], "error": error}


def random_rows(seed: int, categories: tuple[str, ...] = CATEGORIES, most: int = 6) -> list[Row]:
    """Return two-turn answers, three for each category, with random counters."""
    rng = random.Random(seed)
    rows = []
    for question_id, category in enumerate([*categories] * 3, start=81):
        lengths = [[rng.randint(1, most) for _ in range(rng.randint(1, 40))] for _ in range(2)]
        row = make_row(question_id, category, lengths[0] + lengths[1], 1.0)
        row["choices"][0] |= {
            "turns": [" ".join("word" for _ in range(rng.randint(3, 60))) for _ in range(2)],
            "new_tokens": [sum(turn) for turn in lengths],
            "wall_time": [rng.uniform(0.01, 3.0) for _ in range(2)],
            "decoding_steps": [len(turn) for turn in lengths],
        }
        rows.append(row)
    return rows


def answer_rows(rows: Iterable[Row]) -> list[AnswerRow]:
    """Return rows as reports read them."""
    return [AnswerRow.of(row) for row in rows]


def write_answers(path: Path, rows: list[Row], meta: dict[str, Any] | None = None) -> Path:
    """Write an answer file, and its sidecar if one is given; return the answer file's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    if meta is not None:
        sidecar = path.with_name(path.name.removesuffix(".jsonl") + ".meta.json")
        sidecar.write_text(json.dumps(meta), encoding="utf-8")
    return path
