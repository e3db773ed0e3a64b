"""Show the acceptance in an answer file under its right names, and write it in other benches' formats.

docs/acceptance.md says which acceptance length is which. The formats:

- `speculation_profile.json` 1.0, which specdec_bench and ar_validate write beside a draft's checkpoint (fields:
  NVIDIA/Model-Optimizer, examples/specdec_bench, speculation_profile.py). Rates count by draft position: entry i
  is of a step that emits i + 2 tokens or more. Trees and memories that learn have no place there; of a tree a
  position is a depth.
- vLLM's per-request metrics, a line a request: `{"prompt_tokens": N, "metrics": {...}}` with the response's
  `metrics.speculative_decoding`; speculators' scripts read them as raw_requests.jsonl. Steps without a draft are
  not in it.

Run:
    python -m evaluation.convert answers.jsonl --to vllm --out raw_requests.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from evaluation.answers.answer_file import read_lines
from evaluation.answers.record import RunRecord
from evaluation.answers.step_figures import (
    AcceptanceSums,
    TurnSteps,
    acceptance_sums,
    by_category,
    by_position,
    by_start_length,
    by_turn,
    turn_steps,
)
from evaluation.reporting.tables import Cell, Table, figure_cell, json_line
from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.files import write_whole
from model.serve.acceptance import vllm_fields

PROFILE, VLLM = "speculation-profile", "vllm"
# How far a profile's mean may be from 1 + the sum of the marginal rates.
TOLERANCE = 0.02
# What of a sidecar says how it was measured.
MEASUREMENT = (
    *("bench_name", "question_file_name", "max_new_tokens", "temperature", "batch_size"),
    *("device", "dtype", "threads"),
)
MEANINGS = {
    "Tokens a step": "every step counted: MAT of Spec-Bench and of this project, specdec_bench's "
    "mean_accept_length",
    "Tokens a drafted step": "1 + accepted / drafts, steps without a draft left out: vLLM, AIPerf, speculators",
    "Mean of requests": "each request's tokens a step, averaged over requests: specdec_bench's Average_AL",
}

EXAMPLES = """\
examples:
  python -m evaluation.convert data/demo/model_answer/model-hybrid-float32-temp-0.0.jsonl
  python -m evaluation.convert answers.jsonl --to speculation-profile --out speculation_profile.json
  python -m evaluation.convert answers.jsonl --to vllm --out raw_requests.jsonl
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and one line of JSON, and write what is asked for."""
    parser = OptionParser(
        prog="python -m evaluation.convert",
        description="Show all kinds of acceptance lengths, and write them in other benchmarks' "
        "formats.",
        epilog=EXAMPLES,
    )
    parser.add_argument("source", metavar="SOURCE", help="an answer file")
    parser.add_argument("--to", choices=(PROFILE, VLLM), help="write this format too")
    parser.add_argument("--out", metavar="PATH", help="with --to: the file to write")
    options = parser.parse_args(argv)
    if (options.to is None) != (options.out is None):
        raise UserError("to, out: got only one of them; give both, or neither")
    path = Path(options.source)
    turns = turn_steps(row for _, row in read_lines(path))
    if not turns:
        raise UserError(
            f"{path}: has no record of steps (accept_lengths, or a server's speculative_decoding; its counters at "
            "/metrics are sums: evaluation.speed shows tokens a step)"
        )
    if options.to == PROFILE:
        profile = _profile(turns, RunRecord.read(path))
        write_whole(options.out, json.dumps(profile, indent=2) + "\n")
    elif options.to == VLLM:
        lines = [
            {"prompt_tokens": turn.prompt_tokens, "metrics": vllm_fields(turn.steps)}
            for turn in turns
        ]
        write_whole(options.out, "".join(json.dumps(line) + "\n" for line in lines))
    sums = _sums({"": turns} | by_category(turns))
    bins = {
        ("Acceptance by turn of the conversation", "Turn"): by_turn(turns),
        ("Acceptance by tokens of the prompt", "Prompt"): by_start_length(turns),
        ("Acceptance by tokens before the step", "Before"): by_position(turns),
    }
    tables = [
        _meanings_table(_sums(found), caption, first)
        for (caption, first), found in bins.items()
        if found
    ]
    table = _meanings_table(sums, f"Acceptance in {path}", "Category")
    notes = "\n".join(f"- {name}: {words}" for name, words in MEANINGS.items())
    shown = [f"{one.caption}\n\n{one.markdown}" for one in (table, *tables)]
    print("\n\n".join([shown[0], notes, *shown[1:]]))
    figures = {
        name or "all": {
            "tokens_per_step": it.per_step,
            "tokens_per_drafted_step": it.per_drafted_step,
            "mean_of_requests": it.per_request,
        }
        for name, it in sums.items()
    }
    tables_json = {one.caption: one.records for one in tables}
    print(json_line({"source": str(path), "acceptance": figures, **tables_json}))
    return 0


def _sums(parts: Mapping[str, Sequence[TurnSteps]]) -> dict[str, AcceptanceSums]:
    return {name: acceptance_sums(part) for name, part in parts.items()}


def _meanings_table(sums: Mapping[str, AcceptanceSums], caption: str, first: str) -> Table:
    """Return a line for each name's counts, such as a category's; what the answers do not tell is `-`."""
    header = [first, *MEANINGS, "Steps", "Drafted steps", "Drafted tokens", "Accepted %"]
    rows = [
        [
            Cell(name or "all"),
            *map(figure_cell, (it.per_step, it.per_drafted_step, it.per_request)),
            *(
                Cell("-" if value != value else f"{value:.0f}", value)
                for value in (it.num_steps, it.drafts, it.draft_tokens)
            ),
            figure_cell(100 * it.accepted / it.draft_tokens if it.draft_tokens else float("nan")),
        ]
        for name, it in sums.items()
    ]
    return Table(caption, header, rows)


def _profile(turns: Sequence[TurnSteps], record: RunRecord) -> dict[str, Any]:
    """Return the speculation profile of an answer file's steps."""
    sums = acceptance_sums(turns)
    depth = max(sums.lengths) - 1
    marginal = [
        sum(count for length, count in sums.lengths.items() if length >= place + 2) / sums.num_steps
        for place in range(depth)
    ]
    conditional = [
        rate / before if before else 0.0
        for rate, before in zip(marginal, [1.0, *marginal], strict=False)
    ]
    mean, implied = sums.per_step, 1 + sum(marginal)
    lengths = _lengths(sums)
    histogram = lengths.pop("acceptance_length_histogram")
    model = record.values.get("model_path")
    return {
        "schema_version": "1.0",
        "measured": True,
        "method": record.method,
        "draft_checkpoint": None,
        "target_model": {"id": "/".join(PurePath(model).parts[-2:])} if model else None,
        "num_speculative_tokens": depth,
        "block_size": None,
        "max_supported_k": depth,
        "verification_method": "longest_prefix",
        "conditional_accept_rates": [round(rate, 6) for rate in conditional],
        "marginal_accept_rates": [round(rate, 6) for rate in marginal],
        **lengths,
        "accept_length_model": "measured_per_k",
        "accept_length_by_k": {str(depth): round(mean, 6)},
        "acceptance_length_histogram": histogram,
        "per_category": {
            name: _lengths(acceptance_sums(part)) for name, part in by_category(turns).items()
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


def _lengths(sums: AcceptanceSums) -> dict[str, Any]:
    return {
        "mean_accept_length": round(sums.per_step, 6),
        "mean_accept_length_per_request": round(sums.per_request, 6),
        "acceptance_length_histogram": dict(sorted(sums.lengths.items())),
    }


if __name__ == "__main__":
    run_command(main)
