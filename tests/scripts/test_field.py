"""The field: every line keeps to its nodes, and its answers make the table of a page.

Run: pytest tests/scripts/test_field.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.answers.answer_file import read_answers
from evaluation.inference.entrants import entrant_of
from model.commands.command_line import UserError
from model.methods import METHODS
from scripts import field
from scripts.field import (
    DEFAULTS,
    LINES,
    LOOKAHEAD,
    OUTSIDE,
    SIZES,
    left_out,
    main,
    methods,
    write_tree,
)
from scripts.results.command import with_tables
from scripts.results.pack import pack

HEADS = {name: f"data/demo/{name}" for name in ("medusa", "hydra", "eagle", "eagle3")}


def test_what_is_not_compared_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    files = HEADS | {"automaton": "a", "datastore": "b"}
    assert left_out(files) == [] and OUTSIDE[0] in METHODS
    assert left_out(HEADS) == [
        "samd (give --files automaton=FILE)",
        "rest (give --files datastore=FILE)",
    ]
    lines = tuple(line for line in LINES if line.method != "racer")
    monkeypatch.setattr(field, "LINES", lines)
    assert left_out(files) == ["racer (it has no line)"]


@pytest.mark.parametrize("is_cold", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_the_lines_of_a_size_can_run(size: str, is_cold: bool, tmp_path: Path) -> None:
    tree = tmp_path / "a tree.json"
    if size != DEFAULTS:
        write_tree(int(size), tree)
    found = [entrant_of(words) for words in methods(size, HEADS, tree, is_cold)]
    assert found[0].method.name == "vanilla"
    kept = [(one.method.name, one.config) for one in found]
    assert all(kept.count(one) == 1 for one in kept)
    starts = [one.config.start for one in found if hasattr(one.config, "start")]
    assert set(starts) == {"cold", None} if is_cold else "hot" in starts
    if size != DEFAULTS:
        (lookahead,) = (one.config for one in found if one.method.name == "lookahead")
        assert lookahead.num_drafted == int(size) and tuple(LOOKAHEAD) == (8, 16, 32, 64)


def test_answers_keep_to_their_nodes_and_make_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = f"--out {out} --warmup 0 --threads 1 --dtype float32 --max-new-tokens 6".split()
    few = ["--files", "eagle3=data/demo/eagle3", "--sizes", "8", *words, "--num-questions", "1"]
    assert main(few) == 0
    assert "not compared: samd (give --files automaton=FILE), rest" in capsys.readouterr().err
    files = sorted((out / "8").glob("*.jsonl"))
    assert len(files) == 2 + len(methods("8", {"eagle3": "data/demo/eagle3"}, out, False)) - 1
    for file in files:
        (choice,) = (choice for row in read_answers(file) for choice in row.choices)
        assert max(map(max, choice.step_nodes)) <= 8, file
    few_lines = tuple(line for line in LINES if line.method in ("racer", "goose"))
    monkeypatch.setattr(field, "AT_DEFAULTS", few_lines)
    assert main(["--sizes", DEFAULTS, *words, "--num-questions", "1"]) == 0
    pack(out, tmp_path / "field.tar.xz")
    page = "<!-- table: nodes of field.tar.xz -->\n<!-- end of table -->\n"
    text = with_tables(page, tmp_path)
    rows = {
        line.split("|")[1].strip(): line.count(" - ") for line in text.splitlines() if "|" in line
    }
    assert rows["RACER"] == rows["Goose, memory kept across questions"] == 0
    assert rows["Token Recycling, as published"] == 1 and "Not lossless" not in text
    assert str(tmp_path) not in text


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path)]
    for options, expected in (
        (["--methods", "vanilla"], "methods: got some; allowed: the lines of this command"),
        (["--files", "eagle3=nowhere"], "files: got eagle3=nowhere; there is no such file"),
        (["--files", "eagle3"], "files: got 'eagle3'; allowed: NAME=FILE"),
        (["--files", "eagel=data/demo/eagle"], "files: got 'eagel'; allowed: automaton,"),
        (["--bench-name", "none"], "none"),
    ):
        with pytest.raises(UserError, match=expected):
            main([*words, *options])
