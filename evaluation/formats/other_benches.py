"""Other benches' formats of an answer file's acceptance, which their tools read.

- `speculation_profile.json` 1.0, which specdec_bench and ar_validate write beside a draft's checkpoint (fields:
  NVIDIA/Model-Optimizer, examples/specdec_bench, speculation_profile.py). Rates count by draft position: entry i
  is of a step that emits i + 2 tokens or more. Trees and memories that learn have no place there; of a tree a
  position is a depth.
- The run folder of specdec_bench (fields: metrics/*.py of the same). A request's AL is the mean over its steps,
  `Average_AL` and `Category_AL` are means over requests; the histogram counts every step.
- vLLM's per-request metrics, a line a request: `{"prompt_tokens": N, "metrics": {...}}` with the response's
  `metrics.speculative_decoding`; speculators' scripts read them as raw_requests.jsonl. Steps without a draft are
  not in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from evaluation.answers.record import RunRecord
from evaluation.answers.row import AnswerRow
from evaluation.formats.steps import AcceptanceSums, TurnSteps, acceptance_sums, by_category
from evaluation.questions.questions import Question
from model.commands.files import write_whole
from model.serve.acceptance import Acceptance

VERSION = "1.0"
# How far the mean may be from 1 + the sum of the marginal rates.
TOLERANCE = 0.02
# What of a sidecar says how it was measured.
MEASUREMENT = (
    *("bench_name", "question_file_name", "max_new_tokens", "temperature", "batch_size"),
    *("device", "dtype", "threads"),
)


def profile_of(turns: Sequence[TurnSteps], record: RunRecord) -> dict[str, Any]:
    """Return the speculation profile of an answer file's steps."""
    sums = acceptance_sums(turns)
    depth = max(sums.lengths) - 1
    num_steps = sums.lengths.total()
    marginal = [
        sum(count for length, count in sums.lengths.items() if length >= place + 2) / num_steps
        for place in range(depth)
    ]
    conditional = [
        rate / before if before else 0.0
        for rate, before in zip(marginal, [1.0, *marginal], strict=False)
    ]
    mean, implied = sums.per_step, 1 + sum(marginal)
    rounded = [round(rate, 6) for rate in marginal]
    model = record.values.get("model_path")
    return {
        "schema_version": VERSION,
        "measured": True,
        "method": record.method,
        "draft_checkpoint": None,
        "target_model": {"id": "/".join(PurePath(model).parts[-2:])} if model else None,
        "num_speculative_tokens": depth,
        "block_size": None,
        "max_supported_k": depth,
        "verification_method": "longest_prefix",
        "conditional_accept_rates": [round(rate, 6) for rate in conditional],
        "marginal_accept_rates": rounded,
        "mean_accept_length": round(mean, 6),
        "mean_accept_length_per_request": round(sums.per_request, 6),
        "accept_length_model": "measured_per_k",
        "accept_length_by_k": {str(depth): round(mean, 6)},
        "acceptance_length_histogram": dict(sorted(sums.lengths.items())),
        "per_category": {
            name: _category(acceptance_sums(part)) for name, part in by_category(turns).items()
        },
        "measurement_conditions": {
            key: record.values[key] for key in MEASUREMENT if key in record.values
        },
        "validation": {
            "mean_consistency": {
                "implied_mean_accept_length": round(implied, 6),
                "reported_mean_accept_length": round(mean, 6),
                "abs_delta": round(abs(implied - mean), 6),
                "tolerance": TOLERANCE,
                "passed": abs(implied - mean) <= TOLERANCE,
            },
            # By construction: they are shares of ever fewer steps.
            "marginal_monotonicity": {"passed": True, "violations": []},
        },
    }


def write_run(
    folder: Path,
    rows: Sequence[AnswerRow],
    turns: Sequence[TurnSteps],
    record: RunRecord,
    questions: Mapping[int | str, Question],
) -> None:
    """Write an answer file as specdec_bench's run folder, which is there; `questions` are those that are known.

    Raises:
        UserError: if a file cannot be written.
    """
    answered = [row for row in rows if not row.is_failed]
    _write(folder / "acceptance_rate.json", [_acceptance(turns)])
    _write(folder / "timing.json", [_timing(answered)])
    _write(folder / "configuration.json", _configuration(record))
    lines = []
    for row in answered:
        line: dict[str, Any] = {"question_id": row.question_id, "category": row.category}
        if question := questions.get(row.question_id):
            line["turns"] = list(question.turns)
        choices = [{"index": 0, "turns": row.choices[0].turns}]
        lines.append(json.dumps({**line, "choices": choices}, ensure_ascii=False) + "\n")
    write_whole(folder / "responses.jsonl", "".join(lines))


def requests_text(turns: Sequence[TurnSteps]) -> str:
    """Return vLLM's per-request metrics of these turns."""
    lines = [
        {"prompt_tokens": turn.prompt_tokens, "metrics": Acceptance(turn.steps).vllm_fields()}
        for turn in turns
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def _category(sums: AcceptanceSums) -> dict[str, Any]:
    return {
        "mean_accept_length": round(sums.per_step, 6),
        "mean_accept_length_per_request": round(sums.per_request, 6),
        "acceptance_length_histogram": dict(sorted(sums.lengths.items())),
    }


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
