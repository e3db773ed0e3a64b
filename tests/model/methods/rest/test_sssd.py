"""SSSD drafts the most probable continuations in the text and in a datastore, as the authors' code does.

Run: pytest tests/model/methods/rest/test_sssd.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from model.engine.budget import CostCurve, DraftBudget
from model.methods.rest.datastore import Datastore
from model.methods.rest.sssd import SssdConfig, SssdDrafter
from tests.model.decoded import drafted_paths

CPU = torch.device("cpu")
VOCAB = 40
ROOMY = DraftBudget(1000)


def drafter_of(
    folder: Path, prompt: Sequence[int], documents: Sequence[Sequence[int]] = (), **options: Any
) -> SssdDrafter:
    """Return a drafter that has read a prompt, with a datastore of documents if there are any."""
    if documents:
        options["datastore"] = str(folder / "datastore.npy")
        Datastore.build(documents).save(Path(options["datastore"]))
    drafter = SssdDrafter(SssdConfig(**options), VOCAB, CPU)
    drafter.start(prompt)
    return drafter


def paths_of(
    drafter: SssdDrafter, text: Sequence[int], budget: DraftBudget = ROOMY
) -> list[tuple[int, ...]]:
    """Return the drafted nodes as paths of tokens."""
    tree = drafter.propose(text, budget)
    assert tree.token_ids[0] == text[-1]
    return drafted_paths(tree)


def test_a_text_drafts_what_followed_its_longest_ends_first(tmp_path: Path) -> None:
    # After 1 2 came 3 4 (once); after 2 alone also 5 6, twice. The last three tokens begin no run yet.
    text = [1, 2, 3, 4, 7, 2, 5, 6, 8, 2, 5, 6, 9, 30, 1, 2]
    drafter = drafter_of(tmp_path, text)
    paths = paths_of(drafter, text)
    gains = drafter.offer(text, ROOMY, 31)
    # After the match of two 0.6 x 1, and times 0.6 + 0.2 for each token more. After the match of one, which went
    # on in three ways, twice with 5: 0.6 x 2/3, then times 0.7.
    assert paths[:4] == [(3,), (3, 4), (5,), (3, 4, 7)]
    assert gains[:4] == pytest.approx([0.6, 0.48, 0.4, 0.384])
    assert gains[paths.index((5, 6))] == pytest.approx(0.28)
    assert max(map(len, paths)) == 7, "a run of 8 tokens, less the match of one"


def test_an_answers_runs_count_when_they_are_whole(tmp_path: Path) -> None:
    drafter = drafter_of(tmp_path, [31, 32, 33], run_length=4)
    text = [31, 32, 33, 1, 2, 3]
    drafter.skip([1, 2, 3])
    assert paths_of(drafter, [*text, 31]) == [(32,), (32, 33), (32, 33, 1)]
    assert paths_of(drafter, [*text, 1]) == [], "no run of four begins with 1 yet"
    drafter.skip([4])
    assert paths_of(drafter, [*text, 4, 1]) == [(2,), (2, 3), (2, 3, 4)]


def test_a_datastore_proposes_shares_of_all_places_of_an_ending(tmp_path: Path) -> None:
    documents = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [9, 2, 7], [1, 2]]
    drafter = drafter_of(tmp_path, [20, 21, 22, 1, 2], documents, draft_length=2)
    paths = paths_of(drafter, [20, 21, 22, 1, 2])
    gains = drafter.offer([1, 2], ROOMY, 31)
    # "1 2" is found three times (once nothing follows), and, being less than 50 places, "2" four times more.
    assert dict(zip(paths, gains, strict=True)) == pytest.approx(
        {(3,): 4 / 7, (3, 4): 2 / 7, (3, 6): 2 / 7, (7,): 1 / 7}
    )


def test_of_many_places_a_hundred_are_read_evenly(tmp_path: Path) -> None:
    documents = [[1, 10 + number // 100] for number in range(1000)]
    drafter = drafter_of(tmp_path, [30, 31, 32, 33, 1], documents, max_children=40)
    shares = dict(zip(paths_of(drafter, [30, 1]), drafter.offer([30, 1], ROOMY, 31), strict=True))
    assert set(shares) == {(10 + number,) for number in range(10)}
    assert all(share == pytest.approx(0.1, abs=0.011) for share in shares.values())


def test_drafts_keep_to_the_budget_and_offers_are_its_beginning(tmp_path: Path) -> None:
    text = [1, 2, 3, 4, 7, 2, 5, 6, 8, 2, 5, 6, 9, 30, 1, 2]
    drafter = drafter_of(tmp_path, text, max_children=1)
    assert all(path[0] == 3 for path in paths_of(drafter, text))
    drafter = drafter_of(tmp_path, text, budget="auto")
    assert drafter.wants_costs
    assert paths_of(drafter, text, DraftBudget(0)) == []
    assert set(map(len, paths_of(drafter, text, DraftBudget(1)))) == {1}
    chain = paths_of(drafter, text, DraftBudget(9, chain_only=True))
    assert [len(path) for path in chain] == list(range(1, len(chain) + 1))
    gains = drafter.offer(text, ROOMY, 31)
    assert list(gains) == sorted(gains, reverse=True)
    whole = drafter.take(len(gains)).token_ids.tolist()
    assert drafter.take(2).token_ids.tolist() == whole[:3]
    assert drafter.offer(text, ROOMY, 3) == gains[:3]
    assert min(drafter.offer(text, ROOMY, 31, least=0.3)) >= 0.3
    dear = CostCurve((1, 2, 32), (1.0, 1.5, 50.0))
    assert len(paths_of(drafter, text, DraftBudget(9, cost_curve=dear))) == 1
    dearer = CostCurve((1, 2, 32), (1.0, 2.0, 50.0))
    assert paths_of(drafter, text, DraftBudget(9, cost_curve=dearer)) == []


def test_a_datastore_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"with token 40; allowed: 0 to 39; build it with"):
        drafter_of(tmp_path, [1], [[VOCAB]])
