"""The hybrid's guesses: probabilities that sum below one, from all sources, in every budget.

Run: pytest tests/model/methods/hybrid/test_drafter.py
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from model.engine.budget import DraftBudget
from model.engine.loop import generate
from model.methods.hybrid import drafter as module
from model.methods.hybrid.candidate_pool import CandidatePool
from model.methods.hybrid.drafter import HybridConfig, HybridDrafter
from tests.model.decoded import drafter_for, option_names, random_ids, referee, target_of
from tests.model.methods.hybrid.reference_candidate_pool import ReferencePool
from tests.model.methods.hybrid.reference_suffix_index import LONGEST_MATCH, Match, SuffixIndex

LLAMA = "Llama, grouped heads"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=[ReferencePool, CandidatePool], ids=["Python", "C++"])
def _pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test with both candidate pools."""
    monkeypatch.setattr(module, "CandidatePool", request.param)


def fixed(**options: Any) -> HybridDrafter:
    """Return a drafter with a fixed number of nodes for the shared model."""
    config = HybridConfig(budget="fixed", **options)
    return HybridDrafter(config, target_of(LLAMA).vocab_size, CPU)


@pytest.mark.parametrize("num_nodes", [1, 7, 40])
@pytest.mark.parametrize("harvest_prompt", [True, False])
def test_greedy_text_is_that_of_generate_and_drafts_are_accepted(
    num_nodes: int, harvest_prompt: bool
) -> None:
    target, prompt = target_of(LLAMA), random_ids(3, 20)
    drafter = fixed(num_nodes=num_nodes, harvest_prompt=harvest_prompt)
    for _ in range(2):
        found = generate(target, drafter, prompt, max_new_tokens=60)
        assert found.token_ids == referee(target, prompt, 60)
    assert len(found.steps) < 45, "the second time, the rows know the text"
    assert all(step.num_nodes <= 1 + num_nodes for step in found.steps)


def test_sources_agree_on_a_higher_probability_than_each_has_alone() -> None:
    pool = ReferencePool(2**8, 8, 67)
    pool.start([10, 11, 12, 13, 10])
    tree = pool.grow(10, 4, DraftBudget(9, chain_only=True))
    assert tree.token_ids.tolist() == [10, 11, 12, 13, 10], "the text's own continuation"
    rows = [[token, token + 1, *range(50, 56)] for token in (11, 12, 13, 14)]
    pool.write_rows([10, 11, 12, 13], 0, rows, [[3.0, 2.0, *[-9.0] * 6]] * 4)
    guesses = pool._guesses(pool._context_at_end())
    assert guesses[0][1] == 11, "the match and the row of token 10"
    assert guesses == sorted(guesses, reverse=True)
    assert guesses[0][0] > 0.3 and sum(share for share, _, _ in guesses) < 1.1
    pool.start([10])
    alone = {token: share for share, token, _ in pool._guesses(pool._context_at_end())}
    assert alone[11] < guesses[0][0]


def test_every_node_tells_its_source() -> None:
    drafter = fixed(num_nodes=3)
    logits = torch.full((2, drafter.vocab_size), -9.0)
    logits[:, 11], logits[:, 20] = 3.0, 2.9
    drafter.start([10, 11, 12, 10])
    drafter.observe_prompt([12, 10], logits)
    tree = drafter.propose([10], DraftBudget(1))
    assert tree.sources is not None
    named = dict(zip(tree.token_ids.tolist()[1:], tree.sources[1:], strict=True))
    assert named[11] == "rows and text" and named[20] == "rows"
    drafter.reset()
    drafter.start([10, 11, 12, 10])
    tree = drafter.propose([10], DraftBudget(1))
    assert tree.sources is not None and tree.sources[1:] == ("text",)


def test_where_nothing_is_known_frequent_tokens_fill_the_budget() -> None:
    drafter = fixed(num_nodes=4)
    drafter.start([10])
    drafter.skip([30, 31, 30, 32])
    drafter.start([10])
    tree = drafter.propose([10], DraftBudget(2))
    assert tree.sources == (tree.sources or "")[:1] + ("frequent tokens",) * 4
    assert tree.token_ids.tolist()[1] == 30
    drafter.reset()
    drafter.start([10])
    assert drafter.propose([10], DraftBudget(2)).topology.num_nodes == 1


def test_saving_between_texts_changes_no_draft() -> None:
    target = target_of("Llama, grouped heads")
    drafts = []
    for saves in (False, True):
        drafter = drafter_for("hybrid", target, budget="fixed", num_nodes=3, harvest_prompt=False)
        # Nothing is known: one step without a draft, whose single row waits.
        (step,) = generate(target, drafter, [3, 4, 5], max_new_tokens=1).steps
        assert step.num_nodes == 1
        if saves:
            drafter.memory()
        again = generate(target, drafter, [3, 4, 5], max_new_tokens=2)
        drafts.append([step.tree.token_ids.tolist() for step in again.steps])
    assert drafts[0] == drafts[1]


def test_memory_that_does_not_fit_changes_nothing() -> None:
    """The last part checked does not fit: states, while the drafter keeps none."""
    target = target_of("Llama, grouped heads")
    drafters = [
        drafter_for("hybrid", target, budget="fixed", neighbours=count) for count in (32, 0)
    ]
    for drafter, prompt in zip(drafters, ([3, 4, 5], [6, 7, 8]), strict=True):
        generate(target, drafter, prompt, max_new_tokens=8)
    with_states, without = drafters
    before = {name: tensor.clone() for name, tensor in without.memory().items()}
    with pytest.raises(ValueError, match=r"states; allowed: 0"):
        without.load_memory(with_states.memory())
    assert all(torch.equal(tensor, before[name]) for name, tensor in without.memory().items())


def test_a_token_of_the_text_is_likelier() -> None:
    drafter = fixed(num_nodes=2)
    logits = torch.full((2, drafter.vocab_size), -9.0)
    logits[:, 19], logits[:, 20], logits[:, 21] = 4.0, 3.0, 2.5
    for prompt, expected in (([10, 11, 12], 20), ([10, 21, 12], 21)):
        drafter.reset()
        drafter.start(prompt)
        drafter.observe_prompt([21, 12], logits)
        assert drafter.propose([12], DraftBudget(1)).token_ids.tolist() == [12, 19, expected]


def test_the_likest_state_decides_between_rows_of_one_token() -> None:
    drafter = HybridDrafter(HybridConfig(num_nodes=1, budget="fixed"), 100, CPU)
    states = torch.randn(2, 100, generator=torch.Generator().manual_seed(1))
    for before, successor in ((0, 30), (1, 31)):  # the newer row says 31
        after = states[[before, 0]]  # logits after token 9, then after token 10
        after[:, 30:32] = 0.0
        after[1, successor] = 9.0
        drafter.start([9, 10, 8])
        drafter.observe_prompt([9, 10], after)
    for before, expected in ((0, 30), (1, 31)):
        logits = states[[before]]
        logits[:, 30:32] = 0.0
        drafter.start([40, 10])
        drafter.observe_prompt([40], logits)
        tree = drafter.propose([10], DraftBudget(1))
        assert tree.token_ids.tolist() == [10, expected]
        drafter.start([40, 10])
        tree = drafter.propose([10], DraftBudget(1))
        assert tree.token_ids.tolist() == [10, 31], "without a state the newest row decides"


def test_the_prompt_is_harvested_in_chunks_as_in_one() -> None:
    logits = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    memories = []
    for chunks in ([9], [4, 5], [1, 1, 7]):
        drafter = HybridDrafter(HybridConfig(table_bits=8), 64, CPU)
        assert drafter.needs.logit_samples
        prompt = list(range(10))
        drafter.start(prompt)
        begin = 0
        for size in chunks:
            drafter.observe_prompt(prompt[begin : begin + size], logits[begin : begin + size])
            begin += size
        memories.append(drafter.memory())
    for memory in memories[1:]:
        assert all(torch.equal(memory[name], memories[0][name]) for name in memory)


@pytest.mark.parametrize("seed", range(20))
def test_matches_equal_a_slow_search(seed: int) -> None:
    source = random.Random(seed)
    text = source.choices(range(3), k=60)
    index = SuffixIndex(text)

    def agreement(position: int) -> int:
        length = 0
        while length < position and text[position - 1 - length] == text[-1 - length]:
            length += 1
        return length

    longest_key = max((min(agreement(position), 4) for position in range(1, 60)), default=0)
    latest = max(p for p in range(1, 60) if min(agreement(p), 4) == longest_key)
    length = longest_key if longest_key < 4 else min(agreement(latest), LONGEST_MATCH)
    assert index.match_end() == Match(latest, length)


def test_a_match_is_followed_and_looked_up_anew_where_the_text_went_on_otherwise() -> None:
    index = SuffixIndex([1, 2, 3, 4, 5, 1, 2])
    match = index.match_end()
    assert match == Match(2, 2)
    assert index.follow(match, 3, (1, 2, 3)) == Match(3, 3)
    assert index.follow(match, 5, (1, 2, 5)) == Match(5, 1)
    assert index.follow(match, 9, (1, 2, 9)) is None
    assert SuffixIndex([1, 2]).match_end() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_nodes": 0}, "num_nodes: got 0"),
        ({"budget": "some"}, "budget: got 'some'"),
        ({"output_id_topk": 0}, "output_id_topk: got 0"),
        ({"start": "warm"}, "start: got 'warm'"),
        ({"table_bits": 3}, "table_bits: got 3"),
        ({"neighbours": -1}, "neighbours: got -1"),
    ],
)
def test_options_outside_their_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HybridConfig(**options)


def test_more_tokens_in_a_row_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match="output_id_topk: got 9; allowed: 1 to 8, the vocabulary"):
        HybridDrafter(HybridConfig(output_id_topk=9), 8, torch.device("cpu"))
    assert (
        HybridDrafter(HybridConfig(output_id_topk=8), 8, torch.device("cpu")).needs.num_candidates
        == 8
    )


def test_its_documented_options_keep_their_names() -> None:
    documented = {"--num-nodes", "--budget", "--output-id-topk"}
    assert documented <= option_names(HybridConfig)
