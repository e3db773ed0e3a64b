"""Published figures (`data/published`) as one table for the leaderboard.

They are other people's measurements on other machines: shown below our rows, never averaged with
them and never a baseline. The README beside the files says where each comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from evaluation.scoring.figures import CODE, SPEC_BENCH_TASKS
from model.commands.command_line import UserError

PUBLISHED_DIR = Path(__file__).resolve().parents[2] / "data" / "published"
SPEC_BENCH_FILE = "spec_bench_leaderboard.csv"
PAPER_FILE = "token_recycling_paper.csv"
DEFAULT_DEVICES = ("A100", "3090")
BASELINE_METHOD = "AR"
# Spec-Bench's leaderboard names the card without its memory; its text says 80 GB.
DEVICE_NAMES = {"A100": "A100-80GB"}
COLUMNS = (
    *("source", "device", "model", "method"),
    *SPEC_BENCH_TASKS,
    *(CODE, "mean_accepted_tokens", "overall", "tokens_per_second", "conditions"),
)


class PublishedBaseline(NamedTuple):
    """Plain decoding as published: its tokens/s on Spec-Bench, and of what, where and by whom."""

    tokens_per_second: float
    model: str
    device: str
    source: str


def read_published(
    folder: Path, devices: Sequence[str], models: Sequence[str] = ()
) -> pd.DataFrame:
    """Return the published rows of some devices and models, `COLUMNS` wide, in the order of publication.

    Names may be beginnings: `A100` takes `A100-40GB` and `A100-80GB`; no model takes all. Speed-ups are
    ratios, NaN where none was reported.

    Raises:
        UserError: if a file is missing or not as expected, or a device or model has no row.
    """
    try:
        rows = pd.concat([_read_spec_bench(folder), _read_paper(folder)], ignore_index=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"cannot read the published figures in {folder} ({error}); pass --no-published"
        ) from None
    for column, wanted in (("device", devices), ("model", models)):
        if wanted:
            rows = _starting_with(rows, column, wanted)
    return rows[list(COLUMNS)].reset_index(drop=True)


def published_baseline(rows: pd.DataFrame, model: str) -> PublishedBaseline | None:
    """Return the published plain decoding of a model, None if there is none among these rows.

    The model's path or hub name contains the published name in whatever case.
    """
    is_same = rows["model"].map(lambda name: name.lower() in model.lower())
    found = rows[(rows["method"] == BASELINE_METHOD) & is_same].dropna(subset="tokens_per_second")
    if found.empty:
        return None
    row = found.iloc[0]
    return PublishedBaseline(*(row[name] for name in PublishedBaseline._fields))


def _starting_with(rows: pd.DataFrame, column: str, wanted: Sequence[str]) -> pd.DataFrame:
    """The rows whose name in a column begins with one of those wanted, whatever the case."""
    names = rows[column].str.lower()
    for name in wanted:
        if not names.str.startswith(name.lower()).any():
            known = ", ".join(sorted(set(rows[column])))
            raise UserError(f"no published figures for the {column} {name!r}; there are: {known}")
    return rows[names.str.startswith(tuple(name.lower() for name in wanted))]


def _read_spec_bench(folder: Path) -> pd.DataFrame:
    rows = pd.read_csv(folder / SPEC_BENCH_FILE, dtype={"device": str})
    rows["device"] = rows["device"].replace(DEVICE_NAMES)
    rows = rows.rename(columns={"overall_speedup": "overall"})
    return rows.reindex(columns=[*rows.columns, CODE, "tokens_per_second"]).astype(
        {CODE: float, "tokens_per_second": float}
    )


def _read_paper(folder: Path) -> pd.DataFrame:
    """The paper's table; its code column is Code Llama's, as the source says."""
    rows = pd.read_csv(folder / PAPER_FILE)
    rows["device"], rows["conditions"] = (
        rows["conditions"].str.partition(", ")[part] for part in (0, 2)
    )
    rows["model"] = "Vicuna-" + rows["size"] + "-v1.3"
    rows["source"] = rows["source"] + " (" + rows["benchmark_models"] + ")"
    return rows.rename(columns={"overall_speedup": "overall", "mbpp_speedup": CODE})
