"""Published figures (`data/published`) as tables of the leaderboard.

They are other people's measurements on other machines: shown below our rows, never averaged with
them and never a baseline. The README beside the files says where each comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from evaluation.questions.questions import DATA_FOLDER
from evaluation.reporting.leaderboard_tables import MAT, METHOD, OVERALL_TITLE
from evaluation.reporting.notes import difference_text
from evaluation.reporting.tables import Cell, Table, figure_cell
from evaluation.reporting.titles import method_title, task_title
from evaluation.scoring.figures import CODE, OVERALL, SPEC_BENCH_TASKS
from evaluation.scoring.groups import SPEC_BENCH, Group
from model.commands.command_line import UserError

PUBLISHED_DIR = DATA_FOLDER / "published"
FURTHER_FILE = "further_figures.csv"
DEFAULT_DEVICES = ("A100", "3090")
BASELINE_METHOD = "AR"
COLUMNS = (
    *("source", "device", "model", "method"),
    *SPEC_BENCH_TASKS,
    *(CODE, "mean_accepted_tokens", "overall", "tokens_per_second", "conditions"),
)


def read_published(
    folder: Path, devices: Sequence[str], models: Sequence[str] = ()
) -> pd.DataFrame:
    """Return the published rows of some devices and models, `COLUMNS` wide, in the order of publication.

    Names may be beginnings: `A100` takes `A100-40GB` and `A100-80GB`; no model takes all. Speed-ups are ratios, NaN
    where none was reported. A `UserError` if a file is missing or not as expected, or a device or model has no row.
    """
    try:
        parts = [_read_spec_bench(folder), _read_paper(folder), _read_further(folder)]
        rows = pd.concat(parts, ignore_index=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"cannot read the published figures in {folder} ({error}); pass --no-published"
        ) from None
    for column, wanted in (("device", devices), ("model", models)):
        names = rows[column].str.lower()
        for name in wanted:
            if not names.str.startswith(name.lower()).any():
                known = ", ".join(sorted(set(rows[column])))
                raise UserError(
                    f"no published figures for the {column} {name!r}; there are: {known}"
                )
        if wanted:
            rows = rows[names.str.startswith(tuple(name.lower() for name in wanted))]
    return rows[list(COLUMNS)].reset_index(drop=True)


def baseline_of(group: Group, published: pd.DataFrame | None) -> pd.Series | None:
    """Return the published plain decoding that a group's tokens/s compare with: Spec-Bench, greedy, one by one.

    The model's path or hub name contains the published name in whatever case; None if there is no such row.
    """
    facts = group.facts
    is_like_it = facts["bench"] == SPEC_BENCH and facts["temperature"] in ("0", "0.0")
    if published is None or not is_like_it or facts["batch_size"] != "1":
        return None
    is_same = published["model"].map(lambda name: name.lower() in facts["model"].lower())
    found = published[(published["method"] == BASELINE_METHOD) & is_same]
    found = found.dropna(subset="tokens_per_second")
    return None if found.empty else found.iloc[0]


def published_tables(published: pd.DataFrame, groups: Sequence[Group]) -> Iterator[Table]:
    """Yield a table for each source and device of published figures, and why ours differ."""
    for (source, device), rows in published.groupby(["source", "device"], sort=False):
        columns = [*SPEC_BENCH_TASKS] + ([CODE] if rows[CODE].notna().any() else [])
        header = [METHOD, "Model", *map(task_title, columns), MAT, OVERALL_TITLE]
        table = [
            [Cell(method_title(row["method"])), Cell(row["model"])]
            + [figure_cell(row[task], unit="x") for task in columns]
            + [figure_cell(row["mean_accepted_tokens"]), figure_cell(row[OVERALL], unit="x")]
            for row in rows.to_dict("records")
        ]
        yield Table(
            f"{device}, published by: {source}",
            header,
            table,
            num_text_columns=2,
            notes=[difference_text(rows, groups)],
            first=(OVERALL_TITLE, MAT),
        )


def published_rows(published: pd.DataFrame, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the published figures as records, in order, each with why ours differ."""
    return [
        {str(key): value for key, value in row.items()} | {"differs": difference_text(rows, groups)}
        for _, rows in published.groupby(["source", "device"], sort=False)
        for row in rows.to_dict("records")
    ]


def _read_spec_bench(folder: Path) -> pd.DataFrame:
    rows = pd.read_csv(folder / "spec_bench_leaderboard.csv", dtype={"device": str})
    # It names the card without its memory; its text says 80 GB.
    rows["device"] = rows["device"].replace("A100", "A100-80GB")
    rows = rows.rename(columns={"overall_speedup": "overall"})
    return rows.reindex(columns=[*rows.columns, CODE, "tokens_per_second"]).astype(
        {CODE: float, "tokens_per_second": float}
    )


def _read_paper(folder: Path) -> pd.DataFrame:
    """The paper's table; its code column is Code Llama's, as the source says."""
    rows = pd.read_csv(folder / "token_recycling_paper.csv")
    rows["device"], rows["conditions"] = (
        rows["conditions"].str.partition(", ")[part] for part in (0, 2)
    )
    rows["model"] = "Vicuna-" + rows["size"] + "-v1.3"
    rows["source"] = rows["source"] + " (" + rows["benchmark_models"] + ")"
    return rows.rename(columns={"overall_speedup": "overall", "mbpp_speedup": CODE})


def _read_further(folder: Path) -> pd.DataFrame:
    """Rows of other shapes that have a speed-up or accepted tokens; the source names their benchmark."""
    rows = pd.read_csv(folder / FURTHER_FILE).rename(columns={"overall_speedup": "overall"})
    rows["source"] = rows["source"] + " (" + rows["benchmark"] + ")"
    rows = rows.reindex(columns=COLUMNS)
    return rows.dropna(subset=["mean_accepted_tokens", "overall"], how="all")
