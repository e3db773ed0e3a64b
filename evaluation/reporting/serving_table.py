"""The table of servers: how long their clients wait, and what they accept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evaluation.answers.row import AnswerRow
from evaluation.reporting.tables import Cell, Table, figure_cell
from evaluation.scoring.serving import serving_figures

HEADER = ["Server", "Requests", "Tokens/s", "First token, ms", "90%", "Between tokens, ms", "90% "]
HEADER += ["Tokens a step", "Prompt cached %"]
CAPTION = "What clients of servers waited: medians and 90th percentiles over turns"
CACHED = (
    "Prompts from a prefix cache cost less than those before them: start the server without one"
)


def serving_table(rows: Mapping[str, Sequence[AnswerRow]]) -> Table:
    """Return a line for each server's rows, by its name."""
    lines, is_cached = [], False
    for name, answered in rows.items():
        found = serving_figures(answered)
        is_cached = is_cached or found.cached_share > 0
        waits = (found.first_token, found.first_token_slow)
        gaps = (found.between_tokens, found.between_tokens_slow)
        lines.append(
            [
                Cell(name),
                Cell(str(found.num_requests), found.num_requests),
                figure_cell(found.tokens_per_second),
                *(figure_cell(1000 * seconds) for seconds in (*waits, *gaps)),
                figure_cell(found.tokens_per_step),
                figure_cell(100 * found.cached_share),
            ]
        )
    return Table(CAPTION, HEADER, lines, notes=[CACHED] if is_cached else [])
