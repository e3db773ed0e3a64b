"""The field: every method is in it, at equal nodes, and its tables hold the figures of the scores.

Run: pytest tests/scripts/test_field.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from evaluation.inference.entrants import entrant_of
from model.commands.command_line import UserError
from model.methods.registry import drafter_class
from model.methods.samd.static_automaton import StaticAutomaton
from model.methods.samd.suffix_automaton import SuffixAutomaton
from scripts.replay import command as replay_command
from scripts.replay.recording import RecordedTurn, Recording, Source
from scripts.replay.scores import TurnScore
from scripts.studies import field as studies_field
from scripts.studies.command import main
from scripts.studies.field import (
    ENTRANTS,
    LOOKAHEAD,
    NODES,
    OUTSIDE,
    check_entrants,
    compared,
    left_out,
)
from scripts.studies.field_tables import (
    DEFAULTS,
    Entrant,
    Run,
    by_task,
    defaults,
    leads,
    memories,
    ratios,
)
from scripts.studies.lab import Lab
from tests.model.decoded import target_of


def run(title: str, method: str, lengths: dict[str, list[list[int]]]) -> Run:
    """Return a run with these acceptance lengths for each question of each category."""
    scores = [
        TurnScore(
            RecordedTurn(f"{category}{number}", category, None, (1,), (0,) * sum(question)),
            tuple(question),
            (1 + len(title),) * len(question),
        )
        for category, questions in lengths.items()
        for number, question in enumerate(questions)
    ]
    return Run(Entrant(title, method, ""), scores, 3 * 2**20)


FAST = run("hybrid", "hybrid", {"writing": [[4, 2], [3]], "qa": [[1, 2]]})
SLOW = run("pld", "pld", {"writing": [[2, 2, 2], [1, 1, 1]], "qa": [[1, 1, 1]]})
SLOWER = run("pld x", "pld", {"writing": [[1] * 6, [1] * 3], "qa": [[1] * 3]})
COLUMNS = {"8": {one.entrant.title: one for one in (FAST, SLOW, SLOWER)}}


def test_ratios_are_those_of_tokens_a_step_to_the_best_other_method() -> None:
    found = ratios(COLUMNS)
    first, second, third = ([cell.text for cell in row] for row in found.rows)
    # 12 tokens in 5 steps, 12 in 9, 12 in 12.
    assert first[:1] == ["hybrid"] and first[1].startswith("2.40, 1.80x")
    assert second[1].startswith("1.33, 0.56x")
    # pld is no other method for its own variant.
    assert third[1].startswith("1.00, 0.42x")
    lead, _ = leads(COLUMNS).rows
    assert [cell.text for cell in lead[:5]] == ["8", "published", "pld", "2.40", "1.33"]
    assert lead[5].text.startswith("1.80x") and lead[5].value == pytest.approx(1.8)


def test_our_own_variants_are_compared_apart() -> None:
    ours = SLOW._replace(entrant=SLOW.entrant._replace(is_published=False))
    published, among_all = leads({"8": {"hybrid": FAST, "pld": ours, "pld x": SLOWER}}).rows
    assert [cell.text for cell in published[1:4]] == ["published", "pld x", "2.40"]
    assert [cell.text for cell in among_all[1:4]] == ["all", "pld", "2.40"]


def test_intervals_are_paired() -> None:
    # Question by question twice as fast, whatever the question: no draw of questions says otherwise.
    steps = (2, 1, 3, 5, 4)
    twice = run("hybrid", "hybrid", {"qa": [[2] * count for count in steps]})
    once = run("pld", "pld", {"qa": [[1] * 2 * count for count in steps]})
    row, _ = leads({"8": {"hybrid": twice, "pld": once}}).rows
    assert row[5].text == "2.00x [2.00, 2.00]"


def test_tasks_nodes_and_memory() -> None:
    table = by_task("8", COLUMNS["8"])
    assert table.header == ["drafter", "Multi-turn Conversation", "QA"]
    assert [cell.text for cell in table.rows[0]] == ["hybrid", "3.00", "1.50"]
    row = defaults(COLUMNS["8"]).rows[1]
    assert [cell.text for cell in row] == ["pld", "`pld`", "1.33", "3.00", "3.00", "3.00"]
    assert [cell.text for cell in memories(COLUMNS).rows[2]] == ["pld x", "3.00"]


def test_the_lines_are_of_train_free_methods() -> None:
    check_entrants({})
    assert {entrant.method for entrant in ENTRANTS}.isdisjoint(OUTSIDE)
    assert len({entrant.title for entrant in ENTRANTS}) == len(ENTRANTS)
    assert not any(
        drafter_class(entrant.method).drafts_with() == "draft_model" for entrant in ENTRANTS
    )


def test_a_line_of_no_method_is_an_error_and_a_method_of_no_line_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(studies_field, "ENTRANTS", (*ENTRANTS, Entrant("a", "echo", "{n}")))
    with pytest.raises(UserError, match="echo"):
        main(["field"])
    others = tuple(entrant for entrant in ENTRANTS if entrant.method != "hybrid")
    monkeypatch.setattr(studies_field, "ENTRANTS", others)
    files = dict.fromkeys(("automaton", "datastore", "medusa", "hydra", "eagle", "eagle3"), "a")
    assert left_out(files) == " Not compared: hybrid (it has no line)."


def test_a_line_that_needs_a_file_runs_with_it_only(tmp_path: Path) -> None:
    title, file = "samd and a corpus", tmp_path / "a corpus.safetensors"
    assert title not in {entrant.title for entrant in compared({})}
    missing = f"{title} (give --files automaton=FILE), rest (give --files datastore=FILE)"
    assert left_out({}).startswith(f" Not compared: {missing}, medusa (give --files medusa=FILE)")
    with pytest.raises(UserError, match=r"files: got automaton=.*no such file"):
        main(["field", "--files", f"automaton={file}"])
    with pytest.raises(UserError, match="got 'automata'; allowed: automaton, datastore, eagle,"):
        main(["field", "--files", f"automata={file}"])
    with pytest.raises(UserError, match="files: got 'automaton'; allowed: NAME=FILE"):
        main(["field", "--files", "automaton"])
    StaticAutomaton.from_automaton(SuffixAutomaton([1, 2, 3])).save(file)
    check_entrants({"automaton": str(file)})
    assert title in {entrant.title for entrant in compared({"automaton": str(file)})}


def test_fixed_trees_are_cut_to_the_nodes_that_they_have() -> None:
    most = {entrant.method: entrant.most_nodes for entrant in ENTRANTS if entrant.has_heads}
    assert most["eagle"] == 25 and most["medusa"] == most["hydra"] == 63
    assert most["eagle3"] >= max(NODES)
    heads = {name: f"data/demo/{name}" for name in ("medusa", "hydra", "eagle", "eagle3")}
    check_entrants(heads)


def test_lookahead_fits_its_nodes() -> None:
    assert tuple(LOOKAHEAD) == NODES
    for nodes, (level, window, guess) in LOOKAHEAD.items():
        config = entrant_of(f"lookahead --level {level} --window {window} --guess {guess}").config
        assert config.num_drafted == nodes


FEW = ("recycling, as published", "pld", "goose, hot")


def test_the_study_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(studies_field, "NODES", (8,))
    lines = tuple(entrant for entrant in ENTRANTS if entrant.title in ("hybrid", *FEW))
    monkeypatch.setattr(studies_field, "ENTRANTS", lines)
    words = f"field --mix demo=2 --max-new-tokens 6 --top-k 65 --out {tmp_path / 'out'}"
    assert main(words.split()) == 0
    text = (tmp_path / "out" / "field.md").read_text()
    assert all(f"| {title}" in text for title in FEW) and str(tmp_path) not in text
    assert "Not compared: lookahead (it has no line), samd (it has no line)" in text
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [point["x"] for point in report["points"]] == [8] * len(lines)
    assert all(1 <= point["figures"]["mat"] <= 7 for point in report["points"])
    assert max(point["figures"]["nodes"] for point in report["points"]) <= 9
    (table,) = (rows for name, rows in report["tables"].items() if name.startswith("MB held"))
    assert all(row["8"] > 0 and row[DEFAULTS] > 0 for row in table)


def test_what_is_not_recorded_answers_on_the_model_and_heads_are_no_train_free_rival(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(studies_field, "NODES", (8,))
    lines = tuple(
        one for one in ENTRANTS if one.title in ("hybrid", "pld", "esp", "eagle", "eagle3")
    )
    monkeypatch.setattr(studies_field, "ENTRANTS", lines)
    words = f"field --mix demo=2 --max-new-tokens 16 --top-k 65 --out {tmp_path / 'out'}"
    heads = ["--files", "eagle=data/demo/eagle", "eagle3=data/demo/eagle3"]
    assert main([*words.split(), *heads]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    mats = {point["series"]: point["figures"]["mat"] for point in report["points"]}
    assert (
        list(mats) == ["hybrid", "pld", "esp", "eagle", "eagle3"] and mats["eagle3"] > mats["pld"]
    )
    (rows,) = (rows for name, rows in report["tables"].items() if name.startswith("hybrid against"))
    assert {row["best other"] for row in rows} <= {"pld", "esp"}
    (rows,) = (rows for name, rows in report["tables"].items() if name.startswith("MB held"))
    # Their own 0.9M and 3.3M parameters and their KV cache, float32; not the model's embedding of 8 MB.
    held = {row["drafter"]: row["8"] for row in rows}
    assert 3.5 < held["eagle"] < 3.5 + 8 and 12.5 < held["eagle3"] < 12.5 + 8


def test_heads_of_another_model_are_refused_before_anything_runs(tmp_path: Path) -> None:
    source = Source("model", "0", "float32", None, 8192, 65, False, 4, (), "demo")
    lab = Lab(Recording(source), target_of("Llama, grouped heads"), tmp_path)
    with pytest.raises(UserError, match=r"hidden size of \d+; allowed: 256, for which the heads"):
        lab.check("eagle --heads data/demo/eagle")


def test_rows_too_short_for_a_line_are_refused_before_any_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = Entrant("wide", "goose --output-id-topk 66", "--num-nodes {n}")
    monkeypatch.setattr(studies_field, "ENTRANTS", (*ENTRANTS[:1], wide))
    monkeypatch.setattr(Lab, "ranked", lambda lab, half: pytest.fail("something ran"))
    words = f"field --mix demo=2 --max-new-tokens 4 --top-k 65 --out {tmp_path / 'out'}"
    with pytest.raises(UserError, match="asks for 66 tokens of a row; the recording holds 65"):
        main(words.split())


def test_a_study_that_is_cut_off_keeps_what_the_model_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "two.replay"
    words = f"record --mix demo=2 --max-new-tokens 4 --top-k 65 --out {file}"
    assert replay_command.main(words.split()) == 0
    known = Recording.load(file).num_texts
    monkeypatch.setattr(studies_field, "NODES", (8, 16))
    lines = (Entrant("r", "goose --num-nodes 8", "--max-extended-chain {n}"),)
    monkeypatch.setattr(studies_field, "ENTRANTS", lines)
    monkeypatch.setattr(Lab, "ranked", lambda lab, half: [])
    monkeypatch.setattr(studies_field, "_run", cut_off(studies_field._run, after=1))
    with pytest.raises(KeyboardInterrupt):
        main(["field", "--recording", str(file), "--out", str(tmp_path / "out")])
    assert Recording.load(file).num_texts > known


def cut_off(function: Callable[..., Any], after: int) -> Callable[..., Any]:
    """Return the function, which is interrupted at the call after so many."""
    calls = count()

    def called(*arguments: Any) -> Any:
        if next(calls) == after:
            raise KeyboardInterrupt
        return function(*arguments)

    return called


def test_options_that_exceed_their_nodes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies_field, "NODES", (8,))
    monkeypatch.setattr(studies_field, "ENTRANTS", (Entrant("r", "recycling", ""),))
    words = f"field --mix demo=2 --max-new-tokens 4 --top-k 65 --out {tmp_path / 'out'}"
    with pytest.raises(RuntimeError, match="'recycling' drafted 80 nodes; allowed: 8"):
        main(words.split())
