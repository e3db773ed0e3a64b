"""SAMD continues the longer match, or drafts the fallback's tree, as the paper's rule says.

Run: pytest tests/model/methods/samd/test_drafter.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from model.engine.budget import DraftBudget
from model.engine.drafter import VerifiedStep
from model.engine.loop import generate
from model.engine.verification import verify
from model.methods import drafter_class
from model.methods.samd.drafter import FALLBACKS, SamdConfig, SamdDrafter
from tests.model.budget.test_chain_acceptance import CHEAP, DEAR
from tests.model.decoded import drafter_for, random_ids, referee, target_of
from tests.model.methods.samd.test_static_automaton import built

CPU = torch.device("cpu")
VOCAB = 100
LLAMA = "Llama, grouped heads"
TREE = 81


def draft(text: list[int], depth: int = 50, **options: Any) -> list[int]:
    """Return the tokens that are drafted after a text, the root's first."""
    drafter = SamdDrafter(SamdConfig(**options), VOCAB, CPU)
    drafter.start(text)
    return drafter.propose(text, DraftBudget(depth)).token_ids.tolist()


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """An automaton of one document: 0, 1, ..., 29."""
    file = tmp_path / "corpus.safetensors"
    built([list(range(30))]).save(file)
    return str(file)


def test_a_match_of_the_threshold_is_continued_and_a_shorter_one_is_not() -> None:
    text = [*range(10), 50, 3, 4, 5, 6, 7]
    assert draft(text, threshold=5, num_pred_tokens=3) == [7, 8, 9, 50]
    assert len(draft(text, threshold=6)) == TREE
    assert draft(text, threshold=6, fallback="none") == [7]


def test_the_chain_grows_with_the_match_and_has_its_limits() -> None:
    text = [*range(40), 3, 4]
    assert draft(text, fallback="none", tokens_per_match=1) == [4, 5, 6]
    assert draft(text, fallback="none", tokens_per_match=2) == [4, 5, 6, 7, 8]
    assert draft(text, fallback="none", tokens_per_match=2, num_pred_tokens=3) == [4, 5, 6, 7]
    assert draft(text, fallback="none", depth=1) == [4, 5]
    assert draft(text, fallback="none", depth=0) == [4]


def test_a_match_in_the_corpus_counts_less_by_the_bias(corpus: str) -> None:
    # In the text 3, 4 was followed by 60; in the corpus 1, 2, 3, 4 is followed by 5.
    text = [3, 4, 60, 1, 2, 3, 4]
    given = {"fallback": "none", "automaton": corpus, "num_pred_tokens": 1}
    assert draft(text, **given) == [4, 5]
    assert draft(text, **given, bias=1) == [4, 5]
    assert draft(text, **given, bias=2) == [4, 60], "equal lengths: the text wins"
    assert draft(text, fallback="none", num_pred_tokens=1) == [4, 60]


def test_the_bias_counts_against_the_threshold_too(corpus: str) -> None:
    text = [90, *range(2, 12)]  # ten tokens of the corpus, nothing that the text repeats
    given = {"automaton": corpus, "num_pred_tokens": 2}
    assert draft(text, **given) == [11, 12, 13], "10 - 5 >= 5"
    assert len(draft(text, **given, bias=6)) == TREE
    assert len(draft(text, **given, threshold=6)) == TREE


def test_a_document_that_ends_with_the_match_has_nothing_to_offer(corpus: str) -> None:
    text = [28, 29, 50, 28, 29]
    assert draft(text, fallback="none", automaton=corpus, num_pred_tokens=1) == [29, 50]


def test_the_fallback_is_recycling_with_its_options(tmp_path: Path) -> None:
    tree = tmp_path / "tree.json"
    tree.write_text("[[0], [1]]")
    assert len(draft([1, 2], tree_version=str(tree), output_id_topk=2)) == 3
    target = target_of(LLAMA)
    alone = drafter_for("recycling-averaged", target)
    samd = drafter_for("samd", target, threshold=1000)
    for seed in (1, 2):
        runs = [
            generate(target, drafter, random_ids(20, seed=seed), max_new_tokens=30)
            for drafter in (alone, samd)
        ]
        assert runs[0].accept_lengths == runs[1].accept_lengths
    assert all(torch.equal(samd.memory()[name], value) for name, value in alone.memory().items())


def test_the_fallback_learns_from_chains_too() -> None:
    target = target_of(LLAMA)
    samd = drafter_for("samd", target, threshold=1)
    generate(target, samd, random_ids(20, seed=1), max_new_tokens=30)
    known = [int(row.any()) for row in samd.memory()["adjacency"]]
    generate(target, samd, [5, 6, 7] * 4, max_new_tokens=30)
    assert sum(int(row.any()) for row in samd.memory()["adjacency"]) > sum(known)


@pytest.mark.parametrize(
    "options",
    [
        {"fallback": "none"},
        {"fallback": "none", "match": "first", "threshold": 2},
        {"threshold": 1, "num_pred_tokens": 6},
        {"start": "cold", "threshold": 2},
        {"budget": "auto", "threshold": 1},
    ],
)
def test_texts_are_those_of_plain_decoding(options: dict[str, Any]) -> None:
    target = target_of(LLAMA)
    drafter = drafter_for("samd", target, **options)
    longest = 0
    for prompt in ([3, 4, 5, 6] * 4, random_ids(28)):
        answer = generate(target, drafter, prompt, max_new_tokens=40)
        assert answer.token_ids == referee(target, prompt, 40)
        longest = max(longest, *answer.accept_lengths)
    assert longest > 1, "no draft was accepted: the equality says nothing"


def test_a_corpus_changes_the_drafts_and_never_the_text(tmp_path: Path) -> None:
    target = target_of(LLAMA)
    prompt = random_ids(20, seed=4)
    expected = referee(target, prompt, 30)
    file = tmp_path / "corpus.safetensors"
    built([[*prompt, *expected], random_ids(40, seed=5)]).save(file)
    alone = drafter_for("samd", target, fallback="none")
    helped = drafter_for("samd", target, fallback="none", automaton=str(file))
    answers = [generate(target, each, prompt, max_new_tokens=30) for each in (alone, helped)]
    assert [answer.token_ids for answer in answers] == [expected, expected]
    assert len(answers[1].steps) <= 2 < len(answers[0].steps), "the corpus holds the answer"


def test_chains_are_as_long_as_pays() -> None:
    drafter = SamdDrafter(SamdConfig(fallback="none", budget="auto"), VOCAB, CPU)
    text = [*range(40), 3, 4, 5]
    drafter.start(text)
    for cost_curve, length in ((CHEAP, 4), (DEAR, 0)):
        tree = drafter.propose(text, DraftBudget(50, cost_curve=cost_curve))
        assert tree.topology.num_nodes == 1 + length
    assert drafter.propose(text, DraftBudget(50)).topology.num_nodes == 13, "no costs, no cut"


def test_chains_that_do_not_come_true_are_drafted_no_more_at_their_length_of_match() -> None:
    drafter = SamdDrafter(SamdConfig(fallback="none", budget="auto"), VOCAB, CPU)
    short, long = [*range(40), 3, 4, 5], [*range(40), 3, 4, 5, 6, 7, 8]

    def size_after(text: list[int]) -> int:
        drafter.start(text)
        return drafter.propose(text, DraftBudget(50, cost_curve=CHEAP)).topology.num_nodes

    first = {len(text): size_after(text) for text in (short, long)}
    assert min(first.values()) > 1
    for _ in range(600):
        drafter.start(short)
        tree = drafter.propose(short, DraftBudget(50, cost_curve=CHEAP))
        logits = torch.eye(VOCAB)[[90] * tree.topology.num_nodes]
        drafter.observe(VerifiedStep(tree, verify(tree, logits), None))
    assert size_after(short) == 1
    assert size_after(long) == first[len(long)], "of a longer match nothing was seen"
    drafter.reset()
    assert size_after(short) == first[len(short)]


def test_where_the_chain_does_not_pay_the_fallback_drafts() -> None:
    drafter = SamdDrafter(SamdConfig(budget="auto", tree_version="2.2.2"), VOCAB, CPU)
    text = [*range(40), 3, 4, 5, 6, 7]
    drafter.start(text)
    for cost_curve, source in ((CHEAP, "text"), (DEAR, "recycling")):
        tree = drafter.propose(text, DraftBudget(50, cost_curve=cost_curve))
        assert tree.topology.num_nodes > 1
        assert tree.sources[-1] == source


def test_without_a_fallback_nothing_is_kept_but_what_chains_were_worth() -> None:
    alone, helped = (SamdDrafter(SamdConfig(fallback=name), VOCAB, CPU) for name in FALLBACKS[::-1])
    assert not alone.is_hot and not alone.memory()
    assert helped.is_hot and helped.memory()
    assert not alone.needs.cold_start, (
        "a cold start would forget what was learned of chains, as pld does not"
    )


def test_nodes_say_where_they_come_from(corpus: str) -> None:
    drafter = SamdDrafter(SamdConfig(automaton=corpus, threshold=2, bias=0), VOCAB, CPU)
    for text, source in (
        ([40, 41, 42, 40, 41], "text"),
        ([60, 1, 2, 3], "corpus"),
        ([60, 61], "recycling"),
    ):
        drafter.start(text)
        tree = drafter.propose(text, DraftBudget(5))
        assert tree.sources == (source,) * tree.topology.num_nodes


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"budget": "some"}, "budget: got 'some'; allowed: fixed, auto"),
        ({"fallback": "pld"}, "fallback: got 'pld'; allowed: recycling, none"),
        ({"match": "last"}, "match: got 'last'; allowed: first, latest"),
        ({"threshold": 0}, "threshold: got 0; allowed: 1 or more"),
        ({"num_pred_tokens": 0}, "num_pred_tokens: got 0; allowed: 1 to"),
        ({"tokens_per_match": 0}, "tokens_per_match: got 0; allowed: 1 or more"),
        ({"automaton": "a", "bias": -1}, "bias: got -1; allowed: 0 or more"),
        ({"bias": 3}, "bias: got 3 without an automaton; leave it out"),
        ({"fallback": "none", "start": "cold"}, "start: got 'cold' with fallback none"),
        ({"fallback": "none", "output_id_topk": 4}, "output_id_topk: got 4 with fallback none"),
        ({"policy": "no"}, "policy: got 'no'; allowed: average, original"),
        ({"fallback": "none", "policy": "original"}, "policy: got 'original' with fallback none"),
        ({"tree_version": "no"}, "tree_version: got 'no'; allowed:"),
        ({"output_id_topk": 2}, "uses rank"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SamdConfig(**options)


def test_a_corpus_of_another_vocabulary_is_refused(corpus: str) -> None:
    with pytest.raises(ValueError, match=r"with token 29; allowed: 0 to 19; build it with"):
        drafter_class("samd")(SamdConfig(automaton=corpus, output_id_topk=8), 20, CPU)
