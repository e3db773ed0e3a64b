"""Demo questions and published figures are what the READMEs beside them say.

Run: pytest tests/data
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from evaluation.reporting.published import (
    BASELINE_METHOD,
    FURTHER_FILE,
    PUBLISHED_DIR,
    read_published,
)

DATA = Path(__file__).resolve().parents[2] / "data"
TWO_TURNS = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)
ONE_TURN = ("translation", "summarization", "qa", "math_reasoning", "rag")
TASKS = ["mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"]
MAX_CHARACTERS = 2100


@pytest.fixture(scope="module")
def questions() -> list[dict[str, Any]]:
    """Every demo question, in file order."""
    lines = (DATA / "demo/question.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_every_category_has_its_questions(questions: list[dict[str, Any]]) -> None:
    expected = {category: 2 for category in TWO_TURNS + ONE_TURN} | {"code": 4}
    counts = Counter(question["category"] for question in questions)
    assert counts == expected
    assert list(counts) == list(expected)


def test_ids_count_from_one(questions: list[dict[str, Any]]) -> None:
    assert [question["question_id"] for question in questions] == list(range(1, 31))


def test_keys_and_turns(questions: list[dict[str, Any]]) -> None:
    for question in questions:
        keys = ["question_id", "category", "turns"]
        assert list(question) in (keys, [*keys, "reference"])
        assert len(question["turns"]) == (2 if question["category"] in TWO_TURNS else 1)
        assert all(turn and turn == turn.strip() for turn in question["turns"])
        assert len(question.get("reference", question["turns"])) == len(question["turns"]) or (
            question["category"] in ONE_TURN
        )


def test_lengths(questions: list[dict[str, Any]]) -> None:
    for question in questions:
        assert sum(len(turn) for turn in question["turns"]) < MAX_CHARACTERS
        if question["category"] in ("summarization", "rag"):
            assert len(question["turns"][0]) > 1500


def test_prompts_have_the_benchmarks_shape(questions: list[dict[str, Any]]) -> None:
    for question in questions:
        turn, category = question["turns"][0], question["category"]
        if category == "translation":
            assert turn.startswith("Translate German to English: ")
        if category == "summarization":
            assert turn.startswith("Summarize: ")
        if category == "rag":
            passages = turn.split("\n")
            assert len(passages) > 3
            assert passages[-1].endswith("?")
        if category == "code":
            assert turn.startswith('Create a Python script for this problem:\n```python\n"""\n')
            assert turn.endswith('\n"""\n\n```')
            compile(turn.split('"""')[1].strip().splitlines()[-1], "assertion", "exec")


def test_references(questions: list[dict[str, Any]]) -> None:
    for question in questions:
        reference, category = question.get("reference", []), question["category"]
        if category in ("writing", "roleplay", "humanities", "qa", "code"):
            assert "reference" not in question
        if category == "math_reasoning":
            assert float(reference[0].split("#### ")[1])
        if category == "rag":
            assert reference[0][0] in question["turns"][0]


def test_only_german_leaves_ascii(questions: list[dict[str, Any]]) -> None:
    for question in questions:
        assert question["category"] == "translation" or str(question).isascii()


def _assert_plausible(figures: pd.DataFrame) -> None:
    # Empty cells pass: the paper has no MBPP figures for Medusa.
    assert ((figures >= 0.5) & (figures <= 10) | figures.isna()).all(axis=None)


def test_published_leaderboard() -> None:
    table = pd.read_csv(DATA / "published/spec_bench_leaderboard.csv")
    figures = [*TASKS, "mean_accepted_tokens", "overall_speedup"]
    assert list(table.columns) == ["device", "model", "method", *figures, "conditions", "source"]
    assert not table.isna().any(axis=None)
    assert set(table["device"]) == {"3090", "A100", "A100-40GB", "A6000"}
    _assert_plausible(table[figures])
    assert not table.duplicated(["device", "model", "method"]).any()
    for row in table.itertuples():
        speedups = [getattr(row, task) for task in TASKS]
        assert min(speedups) <= row.overall_speedup <= max(speedups)


def test_published_paper_table() -> None:
    table = pd.read_csv(DATA / "published/token_recycling_paper.csv")
    speedups = [*TASKS, "overall_speedup", "mbpp_speedup"]
    lengths = ["mean_accepted_tokens", "mbpp_mean_accepted_tokens"]
    rates = ["tokens_per_second", "mbpp_tokens_per_second"]
    assert {*speedups, *lengths, *rates, "size", "method", "source"} <= set(table.columns)
    _assert_plausible(table[speedups + lengths])
    assert Counter(table["size"]) == {"7B": 6, "13B": 6, "33B": 6}
    base = table[table["method"] == "AR"].set_index("size")
    for prefix in ("", "mbpp_"):
        speedup = "overall_speedup" if not prefix else "mbpp_speedup"
        rate = f"{prefix}tokens_per_second"
        derived = table[rate] / table["size"].map(base[rate])
        assert ((derived - table[speedup]).abs().dropna() < 0.02).all()


def test_further_figures_have_a_source_and_conditions() -> None:
    table = pd.read_csv(PUBLISHED_DIR / FURTHER_FILE)
    figures = ["mean_accepted_tokens", "tokens_per_second", "overall_speedup"]
    assert not table.drop(columns=[*figures, "further"]).isna().any(axis=None)
    assert table["source"].str.contains("https://").all()
    assert table[[*figures, "further"]].notna().any(axis=1).all(), "each says something"
    # It would be taken for the speed of plain decoding on Spec-Bench.
    assert BASELINE_METHOD not in set(table["method"])
    _assert_plausible(table[["mean_accepted_tokens", "overall_speedup"]])
    shown = read_published(PUBLISHED_DIR, ["A40", "GNR-AP", "A6000"])
    assert list(shown["overall"].head(3)) == [2.58, 2.38, 2.27]
    assert set(shown["model"]) == {"Vicuna-7B-v1.3", "Qwen2.5-0.5B", "Llama-2-7b"}
    assert shown["source"].str.contains("Spec-Bench|README|not stated").all()
