"""The words of the report: titles of methods, options and conditions.

Run: pytest tests/evaluation/reporting/test_titles.py
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from evaluation.inference.command import OTHERS
from evaluation.reporting.notes import group_caption, group_notes
from evaluation.reporting.tables import bounds_text
from evaluation.reporting.titles import (
    BUILT_IN_WORDS,
    REFEREE_TITLES,
    RUN_WORDS,
    entry_titles,
    group_facts,
    method_title,
    options_text,
)
from evaluation.scoring.comparable import group_answers, load_answers
from evaluation.scoring.groups import Group
from model.methods import BUILT_IN, METHODS, drafter_class, words_of
from tests.evaluation.answers.answer_rows import make_row, write_answers

META = {"model_path": "models/tiny", "dtype": "float32", "device": "cpu", "bench_name": "demo"}


def _groups(folder: Path, *metas: dict[str, Any]) -> list[Group]:
    """Groups of one-question answers, a file for each record."""
    paths = [
        write_answers(folder / f"{place}.jsonl", [make_row(1, "qa", [1] * 4, 1.0)], META | meta)
        for place, meta in enumerate(metas)
    ]
    return group_answers([load_answers(path) for path in paths])


def test_a_question_file_of_ones_own_is_named(tmp_path: Path) -> None:
    named = {"question_file_sha256": "f" * 64, "question_file_name": "mine.jsonl"}
    (group,) = _groups(tmp_path, named | {"method": "vanilla"})
    assert group_facts([group])[0]["Questions asked"] == "mine.jsonl"


def test_every_title_is_of_a_method_and_a_new_method_is_its_own() -> None:
    assert set(REFEREE_TITLES) == set(OTHERS)
    for name, place in BUILT_IN.items():
        package = importlib.import_module(place.rpartition(".")[0], "model.methods")
        assert name in package.WORDS and words_of(name).title == method_title(name) != name
    assert method_title("unheard-of") == "unheard-of"
    assert method_title("AR") == "Vanilla (autoregressive)"


@pytest.mark.parametrize("method", METHODS)
def test_options_have_no_underscores_in_words(method: str) -> None:
    fields = drafter_class(method).config_class.__dataclass_fields__
    assert "_" not in options_text(dict.fromkeys(fields, 3), method)
    own = words_of(method).options
    assert {name.partition("=")[0] for name in own} <= set(fields)
    assert all(words.count("{}") <= 1 for words in own.values())


def test_words_of_an_option_belong_to_its_method() -> None:
    assert options_text({"depth": 3, "num_nodes": 4}, "eagle2") == (
        "trees of 3 levels, at most 4 drafted tokens a step"
    )
    assert options_text({"depth": 3}, "pld") == options_text({"depth": 3}) == "depth 3"
    theirs = {"threshold": 0.3, "match": 0.5, "start": "hot", "policy": 2, "shuffle": 4}
    assert options_text(theirs, "mine.drafter:Mine") == (
        "threshold 0.3, match 0.5, start hot, policy 2, questions shuffled with seed 4"
    )


def test_values_of_options_are_words_and_no_places_of_a_machine() -> None:
    seeded = [{"harvest_prompt": True}, {"harvest_prompt": False}]
    assert [options_text(it, "recycling") for it in seeded] == [
        "memory seeded from the prompt",
        "memory not seeded from the prompt",
    ]
    assert options_text({"heads": "/home/me/models/org/heads"}, "eagle") == "heads of org/heads"


def test_options_that_are_not_set_are_left_out() -> None:
    options = {"policy": None, "tree_version": "auto", "match": "{}"}
    assert options_text(options, "recycling") == "tree sized to the device, {} match continued"
    assert all(words.count("{}") <= 1 for words in (RUN_WORDS | BUILT_IN_WORDS).values())


def test_what_a_paper_describes_is_told_from_what_this_project_made_of_it(tmp_path: Path) -> None:
    variants = [
        {"method": "recycling", "options": options}
        for options in (
            {"tree_version": "2.2.2", "policy": "original"},
            {"tree_version": "2.2.2", "policy": "average"},
            {"tree_version": "auto", "policy": "average"},
        )
    ]
    pld = [{"method": "pld", "options": {"budget": budget}} for budget in ("fixed", "auto")]
    (group,) = _groups(tmp_path, {"method": "vanilla"}, *variants, *pld)
    assert {title.short for title in entry_titles(group).values()} == {
        "Vanilla (autoregressive)",
        "Token Recycling, as published",
        "Token Recycling, averaged rows (ours)",
        "Token Recycling, tree sized to the device (ours)",
        "Prompt lookup (PLD)",
        "Prompt lookup (PLD), as many tokens as pay (ours)",
    }


def test_entries_of_one_name_are_told_apart_by_letters_and_notes(tmp_path: Path) -> None:
    recycling = [
        {"method": "recycling", "options": {"tree_version": version, "start": "hot"}}
        for version in ("2.2.2", "3.3")
    ]
    (group,) = _groups(tmp_path, {"method": "vanilla"}, *recycling, {"method": "pld"})
    titles = entry_titles(group)
    assert {title.short for title in titles.values()} == {
        *("Token Recycling (a)", "Token Recycling (b)"),
        *("Vanilla (autoregressive)", "Prompt lookup (PLD)"),
    }
    assert titles["recycling (tree_version=3.3)"].long == "Token Recycling (b: tree 3.3)"
    notes = group_notes(group, None)
    assert "Token Recycling (b): tree 3.3, memory kept across questions" in notes
    assert not [note for note in notes if note.startswith("Prompt lookup (PLD):")]


def test_usual_and_unknown_conditions_are_left_out(tmp_path: Path) -> None:
    usual = {
        **{"threads": 1, "max_new_tokens": 48, "temperature": 0.0, "compile": False},
        **{"kernels": "auto", "num_choices": 1, "num_workers": None, "conv_template": "tokenizer"},
        **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "stop": []},
        **{"system_prompt": None, "seed": 0, "shuffle": None, "question_end": 12},
        **{"sdpa_backends": None, "graphs": None, "lacks_kernels": False},
    }
    (group,) = _groups(tmp_path, {"method": "vanilla"} | usual)
    (facts,) = group_facts([group])
    assert group_caption(facts) == (
        "models/tiny; demo questions, questions before index 12; greedy, at most 48 new tokens a "
        "turn; float32; cpu, 1 thread"
    )
    other = {"kernels": "off", "compile": True, "sdpa_backends": "flash+math", "graphs": "off"}
    (group,) = _groups(tmp_path, {"method": "vanilla"} | usual | other)
    words = "compiled passes, kernels launched one by one, kernels off, attention flash+math"
    assert words in group_caption(group_facts([group])[0])


def test_answers_drawn_in_another_way_or_by_other_kernels_are_another_group(tmp_path: Path) -> None:
    drawn = {"method": "vanilla", "temperature": 0.7}
    others = [{"top_k": 1}, {"top_p": 0.1}, {"seed": 4}, {"lacks_kernels": True}]
    others += [{"min_p": 0.2}, {"repetition_penalty": 1.1}, {"stop": ["\n"]}]
    others += [{"system_prompt": text + "a" * 60} for text in ("Be\nbrief ", "a")]
    groups = _groups(tmp_path, drawn, *(drawn | other for other in others))
    found = [set(group_caption(facts).split(", ")) for facts in group_facts(groups)]
    assert len(found) == 1 + len(others)
    for words in (
        *("from the 1 likeliest tokens", "from the likeliest tokens of probability 0.1"),
        *("seed 4", "torch's own kernels", "repetition penalty 1.1", r"answers end after ['\n']"),
        *("probability or more", "system prompt: Be brief aaa"),
    ):
        assert sum(any(words in part for part in parts) for parts in found) == 1, words


def test_records_of_other_writers_may_say_anything(tmp_path: Path) -> None:
    odd = {"versions": ["torch"], "temperature": "warm", "threads": [1], "max_new_tokens": "all"}
    (group,) = _groups(tmp_path, {"method": "vanilla"} | odd)
    caption = group_caption(group_facts([group])[0])
    assert "sampling at temperature warm, at most all new tokens" in caption
    (group,) = _groups(tmp_path, {"method": "vanilla", "versions": {"torch": "2.9", "numpy": "2"}})
    assert group_facts([group])[0]["Software"] == "torch 2.9"


def test_hashes_are_shown_where_nothing_else_tells_groups_apart(tmp_path: Path) -> None:
    metas = [{"method": "vanilla", "model_fingerprint": digits * 6} for digits in ("ab", "cd")]
    found = group_facts(_groups(tmp_path, *metas))
    assert [facts["Weights"] for facts in found] == ["weights " + "ab" * 6, "weights " + "cd" * 6]
    (alone,) = group_facts(_groups(tmp_path / "alone", metas[0]))
    assert "Weights" not in alone and alone["Model"] == "models/tiny"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/someone/models/tiny", "tiny"),
        ("data/demo/model", "demo/model"),
        ("lmsys/vicuna-7b-v1.3", "lmsys/vicuna-7b-v1.3"),
        ("./tiny", "tiny"),
        (None, "unknown model"),
    ],
)
def test_a_models_folders_are_not_shown(path: str | None, expected: str, tmp_path: Path) -> None:
    (group,) = _groups(tmp_path, {"method": "vanilla", "model_path": path, "model_id": None})
    assert group_facts([group])[0]["Model"] == expected


def test_an_interval_that_says_nothing_is_not_shown() -> None:
    assert bounds_text((0.9, 1.234)) == "[0.90, 1.23]"
    assert bounds_text((0.002, 433928.98)) == bounds_text((0.0, 5.0)) == "-"
