"""vLLM's per-request metrics, a line a request: `{"prompt_tokens": N, "metrics": {...}}`.

`metrics` is the response's `metrics.speculative_decoding`; speculators' raw_requests.jsonl has this form. Steps
without a draft are not in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.formats.steps import TurnSteps, steps_of_fields
from evaluation.questions.questions import UNCATEGORISED
from model.commands.command_line import UserError
from model.commands.files import parse_json, read_text

MAX_BYTES = 2**30
NEEDED = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")


def requests_text(turns: Sequence[TurnSteps]) -> str:
    """Return the lines of these turns."""
    lines = [{"prompt_tokens": turn.prompt_tokens, "metrics": turn.vllm_fields()} for turn in turns]
    return "".join(json.dumps(line) + "\n" for line in lines)


def is_request(line: Any) -> bool:
    """Whether a line of JSON is a request of this form."""
    fields = line.get("metrics") if isinstance(line, dict) else None
    return isinstance(fields, dict) and all(key in fields for key in NEEDED)


def read_requests(file: Path) -> list[TurnSteps]:
    """Return the drafted steps of each request; a request is a turn of its own.

    Raises:
        UserError: naming file and line of the first mistake.
    """
    turns = []
    for number, text in enumerate(read_text(file, "requests", MAX_BYTES).split("\n"), start=1):
        if not text.strip():
            continue
        where = f"{file}, line {number}"
        line = parse_json(text, where)
        if not is_request(line):
            raise UserError(f"{where}: lacks metrics with {', '.join(NEEDED)}; give vLLM's")
        try:
            steps, _ = steps_of_fields(line["metrics"])
        except (TypeError, ValueError) as error:
            raise UserError(f"{where}: metrics are not valid: {error}") from None
        length = line.get("prompt_tokens")
        turns.append(TurnSteps((number, 0), UNCATEGORISED, 0, length, steps, is_whole=False))
    return turns
