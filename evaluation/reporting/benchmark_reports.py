"""Read reports of `scripts.benchmark`: what a step costs on a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from model.commands.command_line import UserError


class Benchmark(NamedTuple):
    """The part of a report of `scripts.benchmark` that `step_cost_chart` draws, and its conditions.

    `accepted` and `nodes` of methods are in older reports only.
    """

    conditions: str
    device: str
    dtype: str
    costs: pd.DataFrame
    accepted: dict[str, float]
    nodes: dict[str, float]


def read_benchmark(path: str | Path) -> Benchmark:
    """Read a report of `scripts.benchmark`.

    Raises:
        UserError: if the file is missing or is not such a report.
    """
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
        costs = pd.DataFrame(report["cost_curve"])[["num_nodes", "context", "milliseconds"]]
        costs = costs.astype({"num_nodes": int, "context": int, "milliseconds": float})
        has_one = costs.groupby("context")["num_nodes"].min() == 1
        if costs.empty or not has_one.all() or not (costs["milliseconds"] > 0).all():
            raise ValueError(
                "cost_curve needs times above 0, and the time of 1 node in every context"
            )
        methods = [
            row for row in report.get("methods", []) if (row["mean_accepted_tokens"] or 1) > 1
        ]
        accepted = {row["method"]: float(row["mean_accepted_tokens"]) for row in methods}
        nodes = {
            row["method"]: float(row["nodes_per_step"])
            for row in methods
            if "nodes_per_step" in row
        }
        names = ("shape", "dtype", "device", "threads", "git_commit")
        facts = [f"{name.removeprefix('git_')} {report[name]}" for name in names]
    except OSError as error:
        raise UserError(f"cannot read the benchmark report {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not a report of scripts.benchmark ({type(error).__name__}: {error}); "
            "give the file that its --out wrote"
        ) from None
    return Benchmark(", ".join(facts), report["device"], report["dtype"], costs, accepted, nodes)
