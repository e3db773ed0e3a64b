"""The README's table of results is what the stored reports say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model.commands.command_line import UserError
from scripts.benchmark.results import BEGIN, END, README, ROOT, with_results


def row(method: str, **more: Any) -> dict[str, Any]:
    """Return a row of a leaderboard's report."""
    return {
        "model": "demo/model@1234",
        **{"dtype": "float32", "device": "cpu (x)", "threads": "2", "max_new_tokens": "128"},
        **{"bench": "spec_bench", "commit": "abc", "runs": 3, "questions": 120},
        **{"method": method, "is_baseline": method == "vanilla"},
        **{"exact_tokens_per_second": 100.04, "exact_speedup": 1.004, "exact_speedup_low": 0.98},
        **{"exact_speedup_high": 1.024, "exact_mean_accepted_tokens": 2.096},
        **{"exact_speedup_noise_floor_low": 0.99, "exact_speedup_noise_floor_high": 1.01},
        **more,
    }


def page(*names: str) -> str:
    """Return a page with an old table."""
    return f"before\n{BEGIN} {' '.join(names)} -->\nold\n{END}\nafter\n"


def report(folder: Path, name: str, *rows: dict[str, Any]) -> str:
    """Write a report; return its name."""
    (folder / name).write_text(json.dumps({"measured": rows}), encoding="utf-8")
    return name


def test_the_readme_says_what_its_files_say() -> None:
    text = README.read_text(encoding="utf-8")
    assert with_results(text, ROOT) == text, "run python -m scripts.benchmark.results"


def test_a_table_has_a_column_for_each_report(tmp_path: Path) -> None:
    one = report(tmp_path, "one.json", row("hybrid", exact_speedup=1.5), row("vanilla"))
    half = {"dtype": "bfloat16", "model": "models/smollm2-135m"}
    other = report(tmp_path, "other.json", row("vanilla", **half), row("generate", **half))
    lines = with_results(page(one, other), tmp_path).splitlines()
    assert lines[0] == "before" and lines[-1] == "after" and "old" not in lines
    table = [line for line in lines if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in table] == [
        *("method", table[1].split("|")[1].strip()),
        *("Hybrid", "Vanilla (autoregressive)", "transformers generate"),
    ]
    assert "Demo model, 7M, float32" in table[0] and "SmolLM2-135M-Instruct" in table[0]
    assert "| 100.0 tokens/s, 1.50x [0.98, 1.02], MAT 2.10 |" in table[2]
    assert table[2].rstrip("| ").endswith("-"), "the other report lacks it"
    assert table[3].count("100.0 tokens/s, 1.00x, MAT 2.10") == 2, "the baseline has no interval"
    caption = next(line for line in lines if line.startswith("Demo model"))
    assert "120 questions of spec_bench x 3, at most 128 new tokens, cpu (x), 2 threads" in caption
    assert caption.endswith(
        "commit abc; two runs of vanilla differ by [0.99, 1.01], [0.99, 1.01]."
    ), "one caption for the same conditions"


def test_making_it_twice_changes_nothing(tmp_path: Path) -> None:
    made = with_results(page(report(tmp_path, "one.json", row("vanilla"))), tmp_path)
    assert with_results(made, tmp_path) == made


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "several groups or none"),
        ([row("vanilla"), row("pld", threads="1")], "several groups or none"),
        (None, "is no report"),
    ],
)
def test_what_is_no_report_is_refused(
    rows: list[dict[str, Any]] | None, says: str, tmp_path: Path
) -> None:
    if rows is not None:
        report(tmp_path, "one.json", *rows)
    with pytest.raises(UserError, match=says):
        with_results(page("one.json"), tmp_path)


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no table"):
        with_results("before\nafter\n", tmp_path)
