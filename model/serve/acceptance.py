"""How the drafts of an answer fared: every step as it was, and in the fields of vLLM's responses.

vLLM's counters, and the benches that read them, leave out steps without a draft: its `mean_acceptance_length` is
1 + accepted / drafted steps. This project counts every step: tokens a step. Both come from the same records here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # it imports torch, which reports do without
    from ..engine.step import StepRecord


class StepCounts(NamedTuple):
    """A step in numbers."""

    tokens: int  # emitted, bonus token included
    drafted: int  # nodes of the draft; 0 for a step of the root alone
    accepted: int  # drafted nodes whose tokens were emitted
    depth: int  # of the draft; for a chain its length

    @classmethod
    def of(cls, record: StepRecord, num_tokens: int | None = None) -> StepCounts:
        """Return the counts of a step, of which the first `num_tokens` are part of the answer; None: all."""
        tokens = len(record.tokens) if num_tokens is None else num_tokens
        accepted = min(len(record.accepted_nodes), tokens)
        return cls(tokens, record.num_nodes - 1, accepted, record.tree.topology.max_depth)


def vllm_fields(steps: Sequence[StepCounts]) -> dict[str, Any]:
    """Return `metrics.speculative_decoding` as vLLM's at its level "detailed" (0.32.0, `stats.py`).

    Steps without a draft are left out, as there. Of trees `num_spec_tokens` is the depth of the deepest draft,
    and drafted tokens are nodes.
    """
    drafted = [step for step in steps if step.drafted]
    num_accepted = sum(step.accepted for step in drafted)
    num_drafted = sum(step.drafted for step in drafted)
    histogram = [0] * (1 + max((step.depth for step in drafted), default=0))
    for step in drafted:
        histogram[step.accepted] += 1
    return {
        "mean_acceptance_length": 1 + num_accepted / len(drafted) if drafted else 1.0,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": len(drafted),
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": len(histogram) - 1,
        "per_step_accepted": [step.accepted for step in drafted],
        "per_step_drafted": [step.drafted for step in drafted],
    }
