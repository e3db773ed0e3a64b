"""Figures and tables of the benchmark: ratios within one run, with paired bootstrap intervals over questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from evaluation.answering.referees import REFEREES
from evaluation.answers.row import Turn
from evaluation.answers.step_figures import PARTS
from evaluation.reporting.tables import markdown_table
from evaluation.scoring.intervals import paired_interval, ratio_of_rates
from scripts.benchmark.device_costs import CostPoint, Roofline


class Work(NamedTuple):
    """Tokens and seconds of one method on every question [Q], means over repetitions."""

    tokens: np.ndarray
    seconds: np.ndarray

    @property
    def rate(self) -> float:
        """Tokens per second over all questions."""
        return float(self.tokens.sum() / self.seconds.sum())


def speedup(work: Work, base: Work) -> tuple[float, float, float]:
    """Return the ratio of rates, with a paired bootstrap 95% interval over questions."""
    return work.rate / base.rate, *paired_interval(ratio_of_rates, [*work, *base])


def work_of(runs: list[list[Turn]], seconds: Callable[[Turn], float]) -> Work:
    """Collect tokens and seconds of a method's answers[repetition][question]."""
    tokens = np.array([[len(answer.token_ids) for answer in run] for run in runs])
    times = np.array([[seconds(answer) for answer in run] for run in runs])
    return Work(tokens.mean(axis=0), times.mean(axis=0))


def end_to_end(answer: Turn) -> float:
    """Return the seconds of an answer, prompt included."""
    return answer.wall_time


def decode_only(answer: Turn) -> float:
    """Return the seconds of an answer without its prompt; a referee does not tell them apart."""
    seconds: float = answer.details["decode_time"]
    return seconds


def over(referee: str) -> str:
    """Return the key of a method's ratio over a referee."""
    return f"speedup_over_{referee.replace('-', '_')}"


def summarise(answers: dict[str, list[list[Turn]]], tasks: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row of figures for every method, from answers[method][repetition][question]."""
    base = answers["vanilla"]
    referees = [name for name in REFEREES if name in answers]
    rows: list[dict[str, Any]] = []
    for name, runs in answers.items():
        work = work_of(runs, end_to_end)
        lengths = [length for run in runs for answer in run for length in answer.accept_lengths]
        row: dict[str, Any] = {
            "method": name,
            "tokens_per_second": work.rate,
            "speedup": speedup(work, work_of(base, end_to_end)),
            "mean_accepted_tokens": float(np.mean(lengths)) if lengths else None,
            "differing_answers": sum(
                any(mine.token_ids != plain.token_ids for mine in repetitions)
                for plain, *repetitions in zip(base[0], *runs, strict=True)
            ),
        }
        for referee in referees:
            row[over(referee)] = speedup(work, work_of(answers[referee], end_to_end))
        row["speedup_by_task"] = by_task(
            runs, answers[referees[0] if referees else "vanilla"], tasks
        )
        if name not in REFEREES:
            decode = work_of(runs, decode_only)
            row["decode_tokens_per_second"] = decode.rate
            row["decode_speedup"] = speedup(decode, work_of(base, decode_only))
            spent = {
                part: sum(answer.details["step_times"][part] for run in runs for answer in run)
                for part in PARTS
            }
            row["share_of_step"] = {part: spent[part] / sum(spent.values()) for part in PARTS}
            num_drafted = sum(answer.details["draft_tokens"] for run in runs for answer in run)
            row["nodes_per_step"] = 1 + num_drafted / len(lengths)
        rows.append(row)
    return rows


def by_task(
    runs: list[list[Turn]], base: list[list[Turn]], tasks: Sequence[str]
) -> dict[str, float]:
    """Return the end-to-end ratio of rates in every task."""
    ratios = {}
    for task in dict.fromkeys(tasks):
        chosen = [index for index, name in enumerate(tasks) if name == task]
        parts = ([[run[index] for index in chosen] for run in side] for side in (runs, base))
        mine, theirs = (work_of(part, end_to_end).rate for part in parts)
        ratios[task] = mine / theirs
    return ratios


def print_tables(rows: list[dict[str, Any]], curve: list[CostPoint], roof: Roofline) -> None:
    """Print the figures for people."""

    def ratio(value: tuple[float, float, float] | None) -> str:
        return f"{value[0]:.2f}x [{value[1]:.2f}, {value[2]:.2f}]" if value else ""

    table = []
    for row in rows:
        shares = row.get("share_of_step", {})
        table.append(
            [
                row["method"],
                f"{row['tokens_per_second']:.1f}",
                ratio(row["speedup"]),
                ratio(row.get(over("generate"))),
                ratio(row.get(over("generate-pld"))),
                f"{row['decode_tokens_per_second']:.1f}"
                if "decode_tokens_per_second" in row
                else "",
                ratio(row.get("decode_speedup")),
                f"{row['mean_accepted_tokens']:.2f}" if row["mean_accepted_tokens"] else "",
                " ".join(f"{100 * shares[part]:.0f}" for part in PARTS) if shares else "",
                str(row["differing_answers"]),
            ]
        )
    header = ["method", "tokens/s", "/ vanilla [95%]", "/ generate [95%]"]
    header += ["/ generate-pld [95%]", "decode tokens/s"]
    header += ["decode / vanilla [95%]", "MAT", "% " + " ".join(PARTS), "differ"]
    print(markdown_table(header, table))
    tasks = list(rows[0]["speedup_by_task"])
    base = next((name for name in REFEREES if over(name) in rows[0]), "vanilla")
    print(f"\nend to end / {base}, by task\n")
    by_name = [
        [row["method"], *(f"{row['speedup_by_task'][task]:.2f}x" for task in tasks)] for row in rows
    ]
    print(markdown_table(["method", *tasks], by_name))
    contexts = sorted({point.context for point in curve})
    nodes = sorted({point.num_nodes for point in curve})
    cost = {(point.num_nodes, point.context): point.milliseconds for point in curve}
    print("\nmilliseconds of one forward pass (relative to one node)\n")
    body = [
        [str(n)]
        + [
            f"{cost[n, c]:.2f} ({cost[n, c] / cost[nodes[0], c]:.2f})" if (n, c) in cost else "-"
            for c in contexts
        ]
        for n in nodes
    ]
    print(markdown_table(["nodes", *(f"context {context}" for context in contexts)], body))
    print(
        f"\ncopy bandwidth {roof.bandwidth / 1e9:.1f} GB/s; one token reads {roof.bytes_per_token / 1e6:.1f} MB: "
        f"roofline {roof.milliseconds:.2f} ms, of which a one-node pass reaches {100 * roof.reached:.0f}%"
    )
