"""LogitSpec drafts what the authors' code drafts, on a trace worked out by hand from its source.

Run: pytest tests/model/methods/logitspec/test_drafter.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from model.engine.budget import DraftBudget
from model.engine.drafter import VerifiedStep
from model.engine.loop import generate
from model.engine.tree import DraftTree, TreeTopology
from model.engine.verification import verify
from model.methods.logitspec.drafter import LogitSpecConfig, LogitSpecDrafter
from tests.model.decoded import drafter_for, option_names, random_ids, referee, target_of

VOCAB = 100
LLAMA = "Llama, grouped heads"
ROOMY = DraftBudget(50)
CHAIN = DraftBudget(50, chain_only=True)


def drafter_of(**options: Any) -> LogitSpecDrafter:
    """Return a drafter for a vocabulary of 100 tokens."""
    return LogitSpecDrafter(LogitSpecConfig(**options), VOCAB, torch.device("cpu"))


def likely(*tokens: int) -> torch.Tensor:
    """Return logits [V] whose largest ones are those of these tokens, in falling order."""
    logits = torch.zeros(VOCAB)
    logits[list(tokens)] = torch.arange(len(tokens), 0, -1.0)
    return logits


def verified(drafter: LogitSpecDrafter, tree: DraftTree, **after: torch.Tensor) -> VerifiedStep:
    """Verify a tree with given logits after the first node of each named token, as in `_5=logits`."""
    logits = torch.stack([likely(99)] * tree.topology.num_nodes)
    for name, row in after.items():
        logits[tree.token_ids.tolist().index(int(name[1:]))] = row
    acceptance = verify(tree, logits, num_candidates=drafter.needs.num_candidates)
    return VerifiedStep(tree, acceptance, None)


def shape(tree: DraftTree) -> tuple[list[int], list[int]]:
    """Return the tokens and the parents of a draft."""
    return tree.token_ids.tolist(), list(tree.topology.parents)


def branch_lengths(topology: TreeTopology) -> list[int]:
    """Return the lengths of the chains under the root, in their order."""
    depths = topology.depths[1:]
    return [depth for depth, after in zip(depths, (*depths[1:], 1), strict=True) if after == 1]


def test_a_trace_of_the_authors_code() -> None:
    # File: model/logitspec/generate_drafts_util.py; draft_tree_capacity is 9, the root included.
    drafter = drafter_of(num_nodes=8, max_ngram_size=2, num_pred_tokens=3)
    read = [1, 2, 3, 4, 1, 2, 5, 6, 7]
    drafter.start([*read, 1])
    drafter.observe_prompt(read[:4], torch.stack([likely(8)] * 4))
    drafter.observe_prompt(read[4:], torch.stack([likely(8)] * 4 + [likely(1, 2, 9, 3)]))

    # The next token is 1. The pool does not know 7 1; after 1 alone it has 2 5 6, the latest of two whole
    # continuations. Of the likely tokens 1 is the next one itself. 2 follows: 1 2 went on with 5 6 7,
    # and at rank 1 a branch has four tokens. 9 was not read; with it the capacity is used up. Both
    # branches begin with 2, and nothing is merged.
    tree = drafter.propose([*read, 1], ROOMY)
    assert shape(tree) == ([1, 2, 5, 6, 2, 5, 6, 7, 9], [-1, 0, 1, 2, 0, 4, 5, 6, 0])

    # 2 is accepted, and the logits after it choose 8.
    drafter.observe(verified(drafter, tree, _1=likely(2), _2=likely(8, 6, 1, 30)))

    # Neither 2 8 nor 8 was read. 8 6 was not, but 6 was, and 7 1 2 follow it by now: a whole
    # continuation, of which three tokens fit. 1 goes on as before, since the newest 1 has only one token
    # after it. The capacity ends before 30.
    tree = drafter.propose([*read, 1, 2, 8], ROOMY)
    assert shape(tree) == ([8, 6, 7, 1, 2, 1, 2, 5, 6], [-1, 0, 1, 2, 3, 0, 5, 6, 7])

    # Nothing is accepted: 30 is next, and one branch only has a token that was read.
    drafter.observe(verified(drafter, tree, _8=likely(30, 5, *range(60, 70))))
    tree = drafter.propose([*read, 1, 2, 8, 30], ROOMY)
    assert shape(tree) == ([30, 5, 6, 7, 1, 60, 61, 62, 63], [-1, 0, 1, 2, 3, 0, 0, 0, 0])


def test_likelier_tokens_get_longer_branches() -> None:
    drafter = drafter_of(num_nodes=VOCAB - 1, num_pred_tokens=20)
    drafter.start([*range(50), 60])
    drafter.observe_prompt([0], likely(60, *range(40))[None])
    topology = drafter.propose([60], ROOMY).topology
    # 60 was not read and is the likeliest. Ranks 1 to 8 have four tokens; of the 67 nodes left, 22 of the
    # branches of ranks 9 to 32 take three each.
    assert branch_lengths(topology) == [4] * 8 + [3] * 22 + [1], (
        "the 31st branch takes the last node"
    )
    drafter = drafter_of(num_nodes=200, num_pred_tokens=20)
    drafter.start([*range(50), 60])
    drafter.observe_prompt([0], likely(60, *range(40))[None])
    topology = drafter.propose([60], ROOMY).topology
    ends = branch_lengths(topology)
    assert ends[:40] == [4] * 8 + [3] * 24 + [1] * 8
    assert len(ends) == VOCAB - 1, "a token of the vocabulary is drafted once"


def test_the_continuation_of_the_next_token_stays_inside_the_number_of_nodes() -> None:
    for num_nodes in (1, 3, 20, 21):
        drafter = drafter_of(num_nodes=num_nodes)
        drafter.start([*range(50), 5])
        drafter.observe_prompt([0], likely(5, 90, 91)[None])
        tokens, _ = shape(drafter.propose([5], ROOMY))
        assert tokens == [5, *range(6, 26), 90][: 1 + num_nodes]


def test_a_chain_is_the_first_branch_and_depth_cuts_all() -> None:
    drafter = drafter_of(num_nodes=30)
    drafter.start([*range(50), 5])
    assert shape(drafter.propose([5], CHAIN))[0] == list(range(5, 26))
    drafter.observe_prompt([0], likely(80, 7, 81)[None])
    assert shape(drafter.propose([80], CHAIN))[0] == [80, 7, 8, 9, 10]
    assert shape(drafter.propose([80], DraftBudget(2)))[0][:4] == [80, 7, 8, 81]
    assert shape(drafter.propose([5], DraftBudget(0)))[0] == [5]


def test_the_first_draft_has_only_the_continuation_without_the_prompts_logits() -> None:
    target = target_of(LLAMA)
    prompt = random_ids(8) * 2
    trees = {}
    for harvest in (True, False):
        drafter = drafter_for("logitspec", target, harvest_prompt=harvest)
        answer = generate(target, drafter, prompt, max_new_tokens=30)
        assert answer.token_ids == referee(target, prompt, 30)
        trees[harvest] = answer.steps[0].tree.topology
    assert trees[False].is_chain and trees[False].num_nodes == 8, "what followed the first eight"
    assert trees[True].num_nodes == 64


def test_a_text_leaves_nothing_for_the_next() -> None:
    drafter = drafter_of()
    drafter.start([1, 2, 3, 1])
    drafter.observe_prompt([1, 2, 3], torch.stack([likely(1, 5)] * 3))
    assert drafter.propose([1], ROOMY).topology.num_nodes > 1
    drafter.start([1])
    assert shape(drafter.propose([1], ROOMY))[0] == [1]


@pytest.mark.parametrize("name", ["num_nodes", "max_ngram_size", "num_pred_tokens"])
def test_bad_options_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: got 0; allowed: 1 to"):
        drafter_of(**{name: 0})


def test_its_documented_options_keep_their_names() -> None:
    assert set(["--num-nodes", "--max-ngram-size", "--num-pred-tokens"]) <= option_names(
        LogitSpecConfig
    )
