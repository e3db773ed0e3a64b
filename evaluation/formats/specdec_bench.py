"""The run folder of NVIDIA's specdec_bench: acceptance_rate.json, timing.json, configuration.json, responses.jsonl.

Fields: NVIDIA/Model-Optimizer, examples/specdec_bench, metrics/*.py. A request's AL is the mean over its steps,
`Average_AL` and `Category_AL` are means over requests; the histogram counts every step.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.answers.record import RunRecord
from evaluation.answers.row import AnswerRow
from evaluation.formats.steps import AcceptanceSums, TurnSteps, acceptance_sums, by_category
from evaluation.questions.questions import Question
from model.commands.command_line import UserError
from model.commands.files import parse_json, read_text, write_whole

ACCEPTANCE, TIMING = "acceptance_rate.json", "timing.json"
CONFIGURATION, RESPONSES = "configuration.json", "responses.jsonl"
MAX_BYTES = 2**28


def write_run(
    folder: Path,
    rows: Sequence[AnswerRow],
    turns: Sequence[TurnSteps],
    record: RunRecord,
    questions: Mapping[int | str, Question],
) -> None:
    """Write an answer file as a run folder, which is there; `questions` are those whose turns are known.

    Raises:
        UserError: if a file cannot be written.
    """
    answered = [row for row in rows if not row.is_failed]
    _write(folder / ACCEPTANCE, [_acceptance(turns)])
    _write(folder / TIMING, [_timing(answered)])
    _write(folder / CONFIGURATION, _configuration(record))
    lines = []
    for row in answered:
        line: dict[str, Any] = {"question_id": row.question_id, "category": row.category}
        if question := questions.get(row.question_id):
            line["turns"] = list(question.turns)
        choices = [{"index": 0, "turns": row.choices[0].turns}]
        lines.append(json.dumps({**line, "choices": choices}, ensure_ascii=False) + "\n")
    write_whole(folder / RESPONSES, "".join(lines))


def read_run(folder: Path) -> dict[str, AcceptanceSums]:
    """Return the counts of a run folder by category, those of all under "".

    Of categories only their means over requests are there.

    Raises:
        UserError: if acceptance_rate.json cannot be read.
    """
    file = folder / ACCEPTANCE
    runs = parse_json(read_text(file, "acceptance rates", MAX_BYTES), str(file))
    # Each run that was made into the folder is appended.
    out = runs[-1] if isinstance(runs, list) and runs else runs
    if not isinstance(out, dict) or "Acceptance_Length_Histogram" not in out:
        raise UserError(f"{file}: has no Acceptance_Length_Histogram; give a specdec_bench run")
    lengths = {
        int(length): int(count) for length, count in out["Acceptance_Length_Histogram"].items()
    }
    found = {"": AcceptanceSums(lengths=Counter(lengths))}
    for mean in out.get("Request_AL", {}).values():
        # By request, or by request and turn.
        found[""].request_means += mean.values() if isinstance(mean, dict) else [mean]
    for name, mean in out.get("Category_AL", {}).items():
        found[name] = AcceptanceSums(request_means=[float(mean)])
    return found


def _acceptance(turns: Sequence[TurnSteps]) -> dict[str, Any]:
    sums = acceptance_sums(turns)
    requests = dict.fromkeys(turn.request for turn in turns)
    names = [str(question) for question, _ in requests]
    lengths = dict(sorted(sums.lengths.items()))
    conditional, joint, before, left = {}, {}, 1.0, sums.lengths.total()
    for length, count in lengths.items():
        joint[length] = left / sums.lengths.total()
        conditional[length] = joint[length] / before
        before, left = joint[length], left - count
    return {
        "Request_AL": dict(zip(names, sums.request_means, strict=True)),
        "Category_AL": {
            name: acceptance_sums(part).per_request for name, part in by_category(turns).items()
        },
        "Average_AL": sums.per_request,
        "Acceptance_Length_Histogram": lengths,
        "Conditional_Acceptance_Rate": conditional,
        "Joint_Acceptance_Rate": joint,
    }


def _timing(rows: Sequence[AnswerRow]) -> dict[str, Any]:
    choices = [row.choices[0] for row in rows]
    walls = [seconds for choice in choices for seconds in choice.wall_time]
    tokens = [count for choice in choices for count in choice.new_tokens]
    firsts = [seconds for choice in choices for seconds in choice.time_to_first_token]
    speed = sum(tokens) / sum(choice.seconds for choice in choices)
    found: dict[str, Any] = {"Output TPS": speed, "Output TPS/gpu": speed}
    found["E2E Request Time"] = _statistics(walls)
    if len(firsts) == len(walls):
        found["TTFT Time"] = _statistics(firsts)
        times = zip(tokens, walls, firsts, strict=True)
        speeds = [(count - 1) / (wall - first) for count, wall, first in times if wall > first]
        if speeds:
            found["Request Generation Tokens Per Second"] = _statistics(speeds)
    found["Number of Output Tokens"] = _statistics(tokens)
    return found


def _statistics(values: Sequence[float]) -> dict[str, Any]:
    shares = (0.25, 0.5, 0.75)
    found = {name: getattr(np, name)(values) for name in ("min", "max", "mean", "std")}
    quantiles = {str(share): f"{np.quantile(values, share):.4f}" for share in shares}
    return {**{name: f"{value:.4f}" for name, value in found.items()}, "quantiles": quantiles}


def _configuration(record: RunRecord) -> dict[str, Any]:
    values = record.values
    return {
        "engine": "token-recycling",
        "speculative_algorithm": record.method,
        "model_dir": values.get("model_path"),
        "dataset": record.bench_name,
        "concurrency": values.get("batch_size", 1),
        "output_length": record.max_new_tokens,
        "temperature": values.get("temperature"),
        "tp_size": 1,
        "engine_version": values.get("git_commit"),
        "gpu": values.get("device"),
        "python_version": (values.get("versions") or {}).get("python"),
        "serving_config": record.options,
    }


def _write(file: Path, content: Any) -> None:
    write_whole(file, json.dumps(content, indent=4) + "\n")
