"""Question files of another form than Spec-Bench's, and the conversion.

A turn is the text as published: no instruction is added. Of pinned benchmarks, `reference` is the published
solution, and ids count from 1 in the file's order.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
# OpenAI's role of the model.
ASSISTANT = "assistant"
# Names of the user in ShareGPT's `from`.
USERS = ("human", "user")


def human_eval(content: bytes) -> bytes:
    """Convert OpenAI's HumanEval.jsonl.gz: signature and docstring of a function to write."""
    return _converted(
        gzip.decompress(content), "code", lambda row: (row["prompt"], row["canonical_solution"])
    )


def gsm8k(content: bytes) -> bytes:
    """Convert OpenAI's grade-school maths, test.jsonl."""
    return _converted(content, "math_reasoning", lambda row: (row["question"], row["answer"]))


def math500(content: bytes) -> bytes:
    """Convert the 500 problems of MATH that PRM800K holds out, test.jsonl."""
    return _converted(content, "math_reasoning", lambda row: (row["problem"], row["solution"]))


def in_spec_bench_form(row: Row, place: int) -> Row:
    """Return a question of FastChat, ShareGPT or HumanEval in Spec-Bench's form, another row as it is.

    Of a conversation the user's messages are the turns, which may be none; `place` is its id if it has none. Of
    OpenAI's messages those before the assistant's are, or all of the user's where the assistant has none.
    """
    conversation, messages = row.get("conversations"), row.get("messages")
    if "turns" in row:
        return {key: value for key, value in row.items() if key not in ("messages", "tools")}
    if messages is not None and _are_messages(messages):
        return _trajectory(row, messages, place)
    if isinstance(conversation, list) and all(isinstance(said, dict) for said in conversation):
        said = [(message.get("from"), message.get("value")) for message in conversation]
        form = {
            "question_id": row.get("id", place),
            "category": "",
            "turns": [text for speaker, text in said if speaker in USERS],
            "system": next((text for speaker, text in said if speaker == "system"), None),
        }
        return {**form, **row}
    if "task_id" in row and "prompt" in row:
        return {"question_id": row["task_id"], "category": "code", "turns": [row["prompt"]], **row}
    if "text" in row:
        return {"turns": [row["text"]], **row}
    return row


def _are_messages(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages)
    )


def _trajectory(row: Row, messages: list[Row], place: int) -> Row:
    form = {"question_id": row.get("id", place), "category": ""}
    texts = [_text(one.get("content")) for one in messages]
    asked = [at for at, one in enumerate(messages) if one["role"] == ASSISTANT and at]
    if not asked:
        system = next(
            (text for one, text in zip(messages, texts, strict=True) if one["role"] == "system"),
            None,
        )
        users = [text for one, text in zip(messages, texts, strict=True) if one["role"] in USERS]
        rest = {key: value for key, value in row.items() if key not in ("messages", "tools")}
        return {**form, "turns": users, "system": system, **rest}
    turns = [texts[at - 1] for at in asked]
    return {**form, **row, "turns": turns, "messages": messages[: asked[-1] + 1]}


def _text(content: Any) -> str:
    """Return the text of a message, whose content may come in parts."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _converted(content: bytes, category: str, parts: Callable[[Row], tuple[str, str]]) -> bytes:
    """Return question.jsonl, with turn and reference of each line as `parts` finds them."""
    # Not splitlines: it would cut at separators that JSON strings may hold.
    lines = [line for line in content.decode("utf-8").split("\n") if line]
    rows = []
    for question_id, line in enumerate(lines, start=1):
        turn, reference = parts(json.loads(line))
        row = {"question_id": question_id, "category": category, "turns": [turn]}
        rows.append(json.dumps(row | {"reference": [reference]}, ensure_ascii=False) + "\n")
    return "".join(rows).encode("utf-8")
