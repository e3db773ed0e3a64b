"""`speculation_profile.json` 1.0, which specdec_bench and ar_validate write beside a draft's checkpoint.

Fields: NVIDIA/Model-Optimizer, examples/specdec_bench, speculation_profile.py. Rates count by draft position:
entry i is of a step that emits i + 2 tokens or more. Trees and memories that learn have no place there; of a tree a
position is a depth.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from evaluation.answers.record import RunRecord
from evaluation.formats.steps import AcceptanceSums, TurnSteps, acceptance_sums, by_category
from model.commands.command_line import UserError
from model.commands.files import parse_json, read_text

VERSION = "1.0"
# How far the mean may be from 1 + the sum of the marginal rates.
TOLERANCE = 0.02
MAX_BYTES = 2**28
# What of a sidecar says how it was measured.
MEASUREMENT = (
    *("bench_name", "question_file_name", "max_new_tokens", "temperature", "batch_size"),
    *("device", "dtype", "threads"),
)


def profile_of(turns: Sequence[TurnSteps], record: RunRecord) -> dict[str, Any]:
    """Return the profile of an answer file's steps."""
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


def read_profile(file: Path) -> dict[str, AcceptanceSums]:
    """Return the counts of a profile by category, those of all under "".

    Raises:
        UserError: if it is not a measured profile of this version.
    """
    profile = parse_json(read_text(file, "profile", MAX_BYTES), str(file))
    version = profile.get("schema_version") if isinstance(profile, dict) else None
    if version != VERSION:
        raise UserError(f"{file}: got schema_version {version!r}; allowed: {VERSION!r}")
    histogram = profile.get("acceptance_length_histogram")
    if not profile.get("measured") or not isinstance(histogram, dict):
        raise UserError(f"{file}: has no acceptance_length_histogram; give a measured profile")
    every = AcceptanceSums(lengths=_histogram(histogram))
    every.request_means = [float(profile["mean_accept_length_per_request"])]
    found = {"": every}
    for name, values in (profile.get("per_category") or {}).items():
        part = AcceptanceSums(lengths=_histogram(values.get("acceptance_length_histogram") or {}))
        if (mean := values.get("mean_accept_length_per_request")) is not None:
            part.request_means = [float(mean)]
        found[name] = part
    return found


def profile_text(profile: dict[str, Any]) -> str:
    """Return the content of the file."""
    return json.dumps(profile, indent=2) + "\n"


def _category(sums: AcceptanceSums) -> dict[str, Any]:
    return {
        "mean_accept_length": round(sums.per_step, 6),
        "mean_accept_length_per_request": round(sums.per_request, 6),
        "acceptance_length_histogram": dict(sorted(sums.lengths.items())),
    }


def _histogram(values: dict[str, Any]) -> Counter[int]:
    return Counter({int(length): int(count) for length, count in values.items()})
