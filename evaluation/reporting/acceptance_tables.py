"""Tables of acceptance: each of the three averages under its own name (docs/acceptance.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evaluation.formats.bins import by_position, by_start_length, by_turn
from evaluation.formats.steps import AcceptanceSums, TurnSteps, acceptance_sums
from evaluation.reporting.tables import Cell, Table, figure_cell

MEANINGS = {
    "Tokens a step": "every step counted: MAT of Spec-Bench and of this project, specdec_bench's "
    "mean_accept_length",
    "Tokens a drafted step": "1 + accepted / drafts, steps without a draft left out: vLLM, AIPerf, speculators",
    "Mean of requests": "each request's tokens a step, averaged over requests: specdec_bench's Average_AL",
}
ALL = "all"


def meanings_table(sums: Mapping[str, AcceptanceSums], caption: str, first: str) -> Table:
    """Return a line for each name's counts, such as a category's; what its source does not tell is `-`."""
    header = [first, *MEANINGS, "Steps", "Drafted steps", "Drafted tokens", "Accepted %"]
    rows = [
        [
            Cell(name or ALL),
            figure_cell(it.per_step),
            figure_cell(it.per_drafted_step),
            figure_cell(it.per_request),
            *(_count(value) for value in (it.num_steps, it.drafts, it.draft_tokens)),
            figure_cell(100 * it.accepted / it.draft_tokens if it.draft_tokens else float("nan")),
        ]
        for name, it in sums.items()
    ]
    notes = [f"{name}: {words}" for name, words in MEANINGS.items()]
    return Table(caption, header, rows, notes=notes)


def step_tables(turns: Sequence[TurnSteps]) -> list[Table]:
    """Return acceptance by turn, by the prompt's length, and by the tokens before a step."""
    bins = {
        ("Acceptance by turn of the conversation", "Turn"): by_turn(turns),
        ("Acceptance by tokens of the prompt", "Prompt"): by_start_length(turns),
        ("Acceptance by tokens before the step", "Before"): by_position(turns),
    }
    return [
        meanings_table(
            {name: acceptance_sums(part) for name, part in found.items()}, caption, first
        )
        for (caption, first), found in bins.items()
        if found
    ]


def _count(value: float) -> Cell:
    return Cell("-" if value != value else f"{value:.0f}", value)
