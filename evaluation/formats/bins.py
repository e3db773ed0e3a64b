"""Acceptance by context length, by place of the step in the text, and by turn.

Bins are those of speculators' scripts (vllm-project/speculators, scripts/evaluate): a prompt's length lies in
(4096, 8192], and so on; a step's place in [256, 512), and so on.
"""

from __future__ import annotations

from collections.abc import Sequence

from evaluation.formats.steps import (
    AcceptanceSums,
    TurnSteps,
    acceptance_sums,
    grouped,
    positions_of,
)
from model.serve.acceptance import StepCounts

# 4k to 1M.
START_EDGES = (0, *(2**power for power in range(12, 21)))
POSITION_BIN = 256


def by_start_length(
    turns: Sequence[TurnSteps], edges: Sequence[int] = START_EDGES
) -> dict[str, list[TurnSteps]]:
    """Return the turns by the bin of their prompt's length, in order; turns of unknown length are left out."""
    known = [turn for turn in turns if turn.prompt_tokens is not None]

    def upper(turn: TurnSteps) -> int:
        length = turn.prompt_tokens or 0
        return next((place for place, edge in enumerate(edges[1:]) if length <= edge), len(edges))

    found = grouped(sorted(known, key=upper), upper)
    return {
        f"{edges[place]}-{edges[place + 1]}" if place < len(edges) else f"{edges[-1]}+": part
        for place, part in found.items()
    }


def by_position(
    turns: Sequence[TurnSteps], width: int = POSITION_BIN
) -> dict[str, list[TurnSteps]]:
    """Return the steps by the bin of the tokens before each, as parts of turns, in order.

    Turns whose steps are not known in order are left out.
    """
    parts: dict[int, list[TurnSteps]] = {}
    for turn in turns:
        if not turn.is_in_order or turn.prompt_tokens is None:
            continue
        steps: dict[int, list[StepCounts]] = {}
        for place, step in positions_of(turn):
            steps.setdefault(place // width, []).append(step)
        for place, part in steps.items():
            parts.setdefault(place, []).append(turn._replace(steps=part))
    return {f"{width * place}-{width * (place + 1)}": parts[place] for place in sorted(parts)}


def by_turn(turns: Sequence[TurnSteps]) -> dict[str, list[TurnSteps]]:
    """Return the turns by their index, from 1."""
    found = grouped(sorted(turns, key=lambda it: it.turn), lambda it: it.turn)
    return {str(index + 1): part for index, part in found.items()}


def bin_records(
    bins: dict[str, list[TurnSteps]], with_requests: bool
) -> list[dict[str, str | float]]:
    """Return speculators' records of bins: drafted steps alone count in `mean_acceptance_length`."""
    return [
        {
            "bucket": name,
            **({"num_requests": len(part)} if with_requests else {}),
            **_record(acceptance_sums(part)),
        }
        for name, part in bins.items()
    ]


def _record(sums: AcceptanceSums) -> dict[str, float]:
    return {
        "num_spec_steps": sums.drafts,
        "num_draft_tokens": sums.draft_tokens,
        "num_accepted_draft_tokens": sums.accepted,
        "draft_acceptance_rate": sums.accepted / sums.draft_tokens if sums.draft_tokens else 0.0,
        "mean_acceptance_length": sums.per_drafted_step if sums.drafts else 0.0,
    }
