"""REST drafts the most frequent continuations of the longest match, cut as the authors' code cuts them.

Run: pytest tests/model/methods/rest/test_drafter.py
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from model.engine.budget import DraftBudget
from model.methods.rest.datastore import Datastore
from model.methods.rest.drafter import RestConfig, RestDrafter
from tests.model.decoded import drafted_paths

CPU = torch.device("cpu")
VOCAB = 100


def drafter_of(folder: Path, documents: Sequence[Sequence[int]], **options: Any) -> RestDrafter:
    """Return a drafter with a datastore of these documents."""
    file = folder / "datastore.npy"
    Datastore.build(documents).save(file)
    return RestDrafter(RestConfig(datastore=str(file), **options), VOCAB, CPU)


def draft(
    rest: RestDrafter, text: Sequence[int], budget: DraftBudget | None = None
) -> list[tuple[int, ...]]:
    """Return the drafted nodes as paths of tokens."""
    tree = rest.propose(text, budget or DraftBudget(1000))
    assert tree.token_ids[0] == text[-1]
    return drafted_paths(tree)


def slow_paths(
    documents: Sequence[Sequence[int]], text: Sequence[int], config: RestConfig
) -> list[tuple[int, ...]]:
    """Return the drafted paths, found by looking everywhere and removing one path after another."""
    for span in range(min(config.max_token_span, len(text)), 0, -1):
        found = sorted(
            tuple(document[end : end + config.draft_length])
            for document in documents
            for end in range(span, len(document) + 1)
            if document[end - span : end] == text[-span:]
        )
        counts = Counter(
            path[:length]
            for path in found[: config.max_matches]
            for length in range(1, len(path) + 1)
        )
        if counts and span >= min(config.min_token_span, len(text)):
            ranked = sorted(counts, key=lambda path: (-counts[path], path))[: config.num_nodes]
            while config.cut == "published" and (
                sum(len(set(path)) for path in ranked) > config.num_nodes
            ):
                most = max(len(set(path)) for path in ranked)
                ranked.remove([path for path in ranked if len(set(path)) == most][-1])
            return ranked
    return []


@pytest.mark.parametrize("seed", range(40))
def test_drafts_are_those_of_a_slow_search(seed: int, tmp_path: Path) -> None:
    source = random.Random(seed)
    documents = [
        [source.randrange(4) for _ in range(source.randrange(40))]
        for _ in range(source.randrange(1, 6))
    ]
    options: dict[str, Any] = {
        "num_nodes": source.choice([1, 5, 64]),
        "max_token_span": source.choice([3, 16]),
        "draft_length": source.choice([1, 4, 10]),
        "max_matches": source.choice([2, 5000]),
        "cut": source.choice(["published", "none"]),
    }
    rest = drafter_of(tmp_path, documents, **options)
    for _ in range(25):
        text = [source.randrange(4) for _ in range(source.randrange(1, 30))]
        assert draft(rest, text) == slow_paths(documents, text, rest.config)


def test_a_trace_of_the_authors_code(tmp_path: Path) -> None:
    """Worked out from DraftRetriever/src/lib.rs of FasterDecoding/PAUSE, `Reader::search`."""
    corpus = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 6, 7, 9, 2, 8]
    # "9 1 2" does not occur; "1 2" does, three times: 3 4 1, 3 5 1 and 6 7 9 follow. "2" alone is not asked.
    text = [9, 1, 2]
    whole = drafter_of(tmp_path, [corpus], draft_length=3, num_nodes=7, cut="none")
    # 3 counts twice, everything else once; of equals the alphabetically first ones.
    assert draft(whole, text) == [*((3,), (3, 4), (3, 4, 1), (3, 5), (3, 5, 1), (6,), (6, 7))]
    # The lengths of these seven add up to 1 + 2 + 3 + 2 + 3 + 1 + 2 = 14; the longest go until it is 7 or less:
    # 3 5 1, 3 4 1, then of the three with two tokens, each of which would do, the one ranked last.
    published = drafter_of(tmp_path, [corpus], draft_length=3, num_nodes=7)
    assert draft(published, text) == [(3,), (3, 4), (3, 5), (6,)]
    # A single continuation of ten: 1 + 2 + ... + 10 = 55 is within 64.
    chain = drafter_of(tmp_path, [[*range(30)]])
    assert draft(chain, [0, 1])[-1] == tuple(range(2, 12))
    # Tokens of a path count once: "1 1 1 1" has one.
    repeated = drafter_of(tmp_path, [[2, 3, *[1] * 20]], num_nodes=10)
    assert draft(repeated, [2, 3])[-1] == (1,) * 10


def test_a_match_at_the_end_of_a_document_leaves_the_word_to_a_shorter_one(tmp_path: Path) -> None:
    rest = drafter_of(tmp_path, [[1, 2, 3], [2, 3, 4]])
    assert draft(rest, [1, 2, 3]) == [(4,)], "1 2 3 occurs, and nothing follows"
    assert draft(rest, [5, 3]) == [], "a single token is no match"
    assert draft(rest, [3]) == [(4,)], "unless it is all there is"
    assert draft(drafter_of(tmp_path, [[1, 2, 3]]), [2, 3]) == []


def test_drafts_keep_to_the_budget(tmp_path: Path) -> None:
    rest = drafter_of(tmp_path, [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5], [1, 2, 6]])
    assert draft(rest, [1, 2], DraftBudget(0)) == []
    assert draft(rest, [1, 2], DraftBudget(1)) == [(3,), (6,)]
    assert draft(rest, [1, 2], DraftBudget(9, chain_only=True)) == [(3,), (3, 5)]


def test_what_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"datastore: got none; give a file; build one with python"
    ):
        RestDrafter(RestConfig(), VOCAB, CPU)
    with pytest.raises(ValueError, match=r"with token 100; allowed: 0 to 99; build it with"):
        drafter_of(tmp_path, [[VOCAB]])
    with pytest.raises(ValueError, match=r"min_token_span: got 17; allowed: at most 16"):
        RestConfig(min_token_span=17)
