"""Tree templates: the published one, and one clear error for every kind of mistake.

Run: pytest tests/model/methods/recycling/test_tree_template.py
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from model.budget.tree_template import TreeTemplate
from model.engine.budget import DraftBudget
from model.methods.recycling.drafter import RecyclingConfig, load_template, template_names

PUBLISHED = Path(__file__).resolve().parents[5] / "shared/published/tree_2.2.2.json"


def test_the_default_template_has_the_published_levels() -> None:
    template = load_template("2.2.2")
    assert len(template.paths) == 80
    assert Counter(len(path) for path in template.paths) == {1: 8, 2: 21, 3: 25, 4: 15, 5: 8, 6: 3}
    assert max(template.ranks) == 7
    assert template.topology.num_nodes == 81


def test_the_small_template_has_the_first_nodes_of_the_published_one() -> None:
    def sum_of_ranks(path: tuple[int, ...]) -> int:
        return sum(rank + 1 for rank in path)

    small, published = load_template("2.2.2-8").paths, load_template("2.2.2").paths
    assert len(small) == 8 and {*small} <= {*published}
    rest = {*published} - {*small}
    assert max(map(sum_of_ranks, small)) <= min(map(sum_of_ranks, rest))


def test_the_default_template_has_the_published_paths() -> None:
    if not PUBLISHED.exists():
        pytest.skip("the published template lies outside the repository")
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    paths = published["paths"] if isinstance(published, dict) else published
    assert set(load_template("2.2.2").paths) == {tuple(path) for path in paths}


def test_nodes_follow_their_parents_with_the_rank_of_their_path() -> None:
    template = TreeTemplate([[1, 0], [0], [1], [1, 0, 3]], "test")
    assert template.paths == [(0,), (1,), (1, 0), (1, 0, 3)]
    assert template.topology.parents == (-1, 0, 0, 2, 3)
    assert template.ranks == (0, 0, 1, 0, 3)


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        ([[0], [0, 1], [0]], r"path \[0\] occurs twice"),
        ([[0], [1, 2]], r"path \[1, 2\] lacks its ancestor \[1\]"),
        ([[0], []], r"path \[\]"),
        ([[0], [-1]], r"path \[-1\]"),
        ([[0], [0.5]], r"path \[0\.5\]"),
        ([[0], [True]], r"path \[True\]"),
        ([[0], ["a"]], r"path \['a'\]"),
        ([[0], 3], r"path 3"),
        ([[0], None], r"path None"),
        ([[rank] for rank in range(5000)], "5000 paths"),
    ],
)
def test_a_bad_template_names_the_wrong_path(paths: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text) as error:
        TreeTemplate(paths, "mine")
    assert "mine" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_rank_beyond_k_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"path \[7\] uses rank 7; .* give output_id_topk 8 or more"
    ):
        RecyclingConfig(output_id_topk=7)
    file = tmp_path / "two.json"
    file.write_text("[[0], [1], [0, 1]]", encoding="utf-8")
    assert RecyclingConfig(output_id_topk=2, tree_version=str(file)).output_id_topk == 2
    with pytest.raises(ValueError, match=r"uses rank 1; allowed: 0 to 0"):
        RecyclingConfig(output_id_topk=1, tree_version=str(file))


def test_files_hold_a_list_or_an_object_with_paths(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    for content in ([[0], [0, 0]], {"paths": [[0], [0, 0]], "note": "any"}):
        file.write_text(json.dumps(content), encoding="utf-8")
        assert load_template(str(file)).paths == [(0,), (0, 0)]


@pytest.mark.parametrize("content", ["{", "", '{"path": []}', "3", '"text"', "[" * 10**5])
def test_a_file_that_is_no_template_is_an_error(content: str, tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="tree template"):
        load_template(str(file))


def test_an_unknown_name_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"2\.2\.2"):
        load_template("2.2")
    assert "2.2.2" in template_names()


@pytest.mark.parametrize("depth", range(8))
def test_a_budget_cuts_levels_or_leaves_the_best_chain(depth: int) -> None:
    template = load_template("2.2.2")
    cut = template.within(DraftBudget(depth))
    assert cut.paths == [path for path in template.paths if len(path) <= depth]
    chain = template.within(DraftBudget(depth, chain_only=True))
    assert chain.paths == [(0,) * length for length in range(1, min(depth, 6) + 1)]
    assert chain.topology.is_chain
