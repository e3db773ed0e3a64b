"""Block 1: every method on the device, its tokens and steps held to the CPU's, its waits to one a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from model.engine.target import TargetModel
from scripts.gpu_check.bench import Bench
from scripts.gpu_check.findings import Findings, Table
from tests.simulated_device.demo import KINDS, SETTINGS, Run, Setting, demo_target, run
from tests.simulated_device.double.accounts import Accounts

# A step waits for its read-out; these methods grow their trees on the device and ask it once more.
ALLOWED_WAITS, MORE_WAITS = 1, {"eagle": 2, "eagle2": 2, "eagle3": 2}


def every_method(bench: Bench) -> Findings:
    """Decode two texts with every method on every kind of target, in float32."""
    found = Findings()
    chosen = bench.sizes.methods
    settings = [one for one in SETTINGS if not chosen or one.name in chosen]
    target_of = cache(partial(demo_target, device=str(bench.device)))
    on_cpu = demo_target("eager", "cpu")
    expected = cache(lambda index: run(on_cpu, settings[index], Accounts()))
    rows: list[dict[str, Any]] = []
    cases = [(kind, setting) for kind in KINDS for setting in settings if setting.runs_on(kind)]
    for kind, setting in bench.in_time(cases, found):
        decoded = found.attempt(
            f"{setting.name}, {kind}", partial(_decoded, bench, target_of, kind, setting)
        )
        if decoded is not None:
            rows.append(_row(kind, setting, decoded, expected(settings.index(setting)), found))
    found.figures |= {"runs": rows, "tokens_equal": _all(rows, "tokens_equal")}
    found.figures["steps_equal"] = _all(rows, "steps_equal")
    found.tables.append(_table(rows))
    return found


def _decoded(
    bench: Bench, target_of: Callable[[str], TargetModel], kind: str, setting: Setting
) -> Run:
    target = target_of(kind)
    with bench.counted_waits() as accounts:
        return run(target, setting, accounts)


def _row(
    kind: str, setting: Setting, decoded: Run, expected: Run, found: Findings
) -> dict[str, Any]:
    """Return the figures of a run; add what is wrong with it to the problems."""
    name = f"{setting.name}, {kind}"
    tokens = [text.tokens for text in decoded.texts] == [text.tokens for text in expected.texts]
    steps = [text.accept_lengths for text in decoded.texts] == [
        text.accept_lengths for text in expected.texts
    ]
    waits = decoded.costs.waits
    if not tokens:
        found.problems.append(f"{name}: other tokens than on the CPU")
    elif not steps:
        found.problems.append(f"{name}: the CPU's tokens, but in other steps: drafts differ")
    if waits.total() > MORE_WAITS.get(setting.method, ALLOWED_WAITS):
        found.problems.append(f"{name}: a step waits {waits.total()} times: {dict(waits)}")
    return {
        "kind": kind,
        "method": setting.name,
        "tokens_equal": tokens,
        "steps_equal": steps,
        "waits": dict(waits),
        "launches": decoded.costs.launches or None,
        "kernels": decoded.costs.kernels or None,
    }


def _all(rows: list[dict[str, Any]], key: str) -> bool | None:
    return all(row[key] for row in rows) if rows else None


def _table(rows: list[dict[str, Any]]) -> Table:
    header = (
        "target",
        "method",
        "tokens",
        "steps",
        "waits a step",
        "launches a step",
        "kernels a step",
    )
    body = [
        [
            row["kind"],
            row["method"],
            "equal" if row["tokens_equal"] else "DIFFER",
            "equal" if row["steps_equal"] else "DIFFER",
            str(sum(row["waits"].values())),
            str(row["launches"] or "-"),
            str(row["kernels"] or "-"),
        ]
        for row in rows
    ]
    return Table("demo model in float32, against the CPU", header, body)
