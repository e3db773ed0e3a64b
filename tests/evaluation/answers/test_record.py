"""The table of conditions: a condition that is added there, and nowhere else, counts everywhere.

Run: pytest tests/evaluation/answers/test_record.py
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from evaluation.answers import record
from evaluation.answers.log import AnswerLog
from evaluation.answers.record import (
    CIRCUMSTANCES,
    CONDITIONS,
    Condition,
    RunRecord,
    Use,
    recorded_options,
    sidecar_path,
)
from evaluation.checking.rerun import Replay
from evaluation.reporting.notes import group_caption
from evaluation.reporting.titles import group_facts
from evaluation.scoring.comparable import differing_conditions, group_answers, load_answers
from model.commands.command_line import UserError
from model.commands.model_options import ModelOptions
from model.methods.recycling.drafter import RecyclingConfig
from tests.evaluation.answers.answer_rows import answer_rows, make_row, write_answers

EVERYWHERE = Use.RECORDED | Use.RESUMED | Use.COMPARED | Use.NEEDED | Use.EQUAL
ROWS = [make_row(1, "qa", [2, 2], 1.0)]


@pytest.fixture
def flavour(monkeypatch: pytest.MonkeyPatch) -> None:
    """A condition of a kind that the project does not have."""
    added = Condition("flavour", EVERYWHERE, default="plain")
    monkeypatch.setattr(record, "CONDITIONS", (*CONDITIONS, added))


def meta_of(method: str, **further: Any) -> dict[str, Any]:
    """Return a sidecar that has every condition a rerun needs."""
    needed = dict.fromkeys(record.keys(Use.NEEDED), "x")
    return needed | {"method": method, "temperature": 0.0, "bench_name": "demo"} | further


def write_run(folder: Path, method: str, **further: Any) -> Path:
    """Write a run's answers with its sidecar."""
    name = f"{method}-{'-'.join(map(str, further.values()))}.jsonl"
    return write_answers(folder / name, ROWS, meta_of(method) | further)


def test_no_condition_is_there_twice_and_none_is_a_circumstance() -> None:
    names = [condition.key for condition in CONDITIONS]
    assert len(set(names)) == len(names) and CIRCUMSTANCES.isdisjoint(names)


def test_a_new_condition_is_copied_from_the_options_of_a_run(flavour: None) -> None:
    options = dict.fromkeys(record.keys(Use.RECORDED), 1) | {"flavour": "mint", "other": 2}
    assert recorded_options(options)["flavour"] == "mint"
    assert "other" not in recorded_options(options)


def test_resuming_refuses_another_value_of_a_new_condition(flavour: None, tmp_path: Path) -> None:
    file = write_run(tmp_path, "pld", flavour="mint")
    with pytest.raises(UserError, match="to a run with flavour 'mint', this run has 'plum'"):
        AnswerLog(file, meta_of("pld", flavour="plum"))
    AnswerLog(file, meta_of("pld", flavour="mint")).close()


def test_a_new_condition_that_is_not_for_resuming_may_differ(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(record, "CONDITIONS", (*CONDITIONS, Condition("flavour", Use.OPTION)))
    file = write_run(tmp_path, "pld", flavour="mint")
    AnswerLog(file, meta_of("pld", flavour="plum")).close()


def test_a_new_condition_separates_groups_and_is_shown(flavour: None, tmp_path: Path) -> None:
    files = [
        write_run(tmp_path, method, flavour=flavour)
        for method in ("vanilla", "pld")
        for flavour in ("mint", "plum")
    ]
    files.append(
        write_answers(tmp_path / "old.jsonl", ROWS, meta_of("vanilla") | {"flavour": "plain"})
    )
    older = {key: value for key, value in meta_of("pld").items() if key != "flavour"}
    files.append(write_answers(tmp_path / "older.jsonl", ROWS, older))
    groups = group_answers([load_answers(file) for file in files])
    assert sorted(group.facts["flavour"] for group in groups) == ["mint", "plain", "plum"]
    assert all(len(group.rows) == 2 for group in groups), "an old file has the default"
    facts = zip(groups, group_facts(groups), strict=True)
    captions = {group.facts["flavour"]: group_caption(shown) for group, shown in facts}
    assert "flavour mint" in captions["mint"] and "flavour" not in captions["plain"]


def test_speed_warns_of_a_new_condition(flavour: None, tmp_path: Path) -> None:
    one, other = (write_run(tmp_path, "pld", flavour=flavour) for flavour in ("mint", "plum"))
    assert differing_conditions(one, other) == [f"flavour is 'mint' in {one} but 'plum' in {other}"]
    meta = {key: value for key, value in meta_of("vanilla").items() if key != "flavour"}
    older = write_answers(tmp_path / "older.jsonl", ROWS, meta)
    assert differing_conditions(one, older) == [
        f"flavour is 'mint' in {one} but 'plain' in {older}"
    ]
    foreign = write_answers(tmp_path / "foreign.jsonl", ROWS)
    assert differing_conditions(one, foreign) == []


def test_a_rerun_needs_a_new_condition_and_needs_it_equal(flavour: None, tmp_path: Path) -> None:
    one, other = (write_run(tmp_path, "pld", flavour=flavour) for flavour in ("mint", "plum"))
    with pytest.raises(
        UserError, match=r"has flavour 'mint', .* 'plum'; allowed: answers of equal"
    ):
        Replay((one, other), (answer_rows(ROWS), answer_rows(ROWS)), ModelOptions(), None)
    values = RunRecord.read(one).values
    del values["flavour"]
    sidecar_path(one).write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"has flavour 'plain', .* 'plum'"):  # an older sidecar
        Replay((one, other), (answer_rows(ROWS), answer_rows(ROWS)), ModelOptions(), None)
    del values["dtype"]
    sidecar_path(one).write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"the sidecar of .* has no 'dtype'"):
        Replay((one, other), (answer_rows(ROWS), answer_rows(ROWS)), ModelOptions(), None)


def test_what_the_table_does_not_know_must_be_equal_to_resume(tmp_path: Path) -> None:
    file = write_run(tmp_path, "pld", unheard_of=1)
    with pytest.raises(UserError, match="to a run with unheard_of 1, this run has None"):
        AnswerLog(file, meta_of("pld"))


@pytest.mark.parametrize("found", [None, "missing"])
def test_resuming_takes_the_default_of_a_condition_that_an_older_sidecar_lacks(
    flavour: None, found: str | None, tmp_path: Path
) -> None:
    meta = meta_of("pld", flavour=found)
    if found == "missing":
        del meta["flavour"]
    file = write_answers(tmp_path / "older.jsonl", ROWS, meta)
    with pytest.raises(UserError, match="to a run with flavour 'plain', this run has 'plum'"):
        AnswerLog(file, meta_of("pld", flavour="plum"))
    AnswerLog(file, meta_of("pld", flavour="plain")).close()


def test_resuming_derives_the_options_that_an_older_sidecar_left_open(tmp_path: Path) -> None:
    older = asdict(RecyclingConfig(policy="average")) | {"harvest_prompt": None}
    file = write_run(tmp_path, "recycling", options=older)
    for config in (RecyclingConfig(policy="original"), RecyclingConfig(tree_version="auto")):
        with pytest.raises(UserError, match=r"to a run with options .*'harvest_prompt': True"):
            AnswerLog(file, meta_of("recycling", options=asdict(config)))
    AnswerLog(file, meta_of("recycling", options=asdict(RecyclingConfig(policy="average")))).close()
