"""SuffixDecoding drafts what the authors' rule says, from this text and from earlier answers.

Run: pytest tests/model/methods/suffix/test_drafter.py
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from model.engine.budget import DraftBudget
from model.engine.drafter import VerifiedStep
from model.engine.read_out import Candidates
from model.engine.tree import DraftTree
from model.engine.verification import Acceptance
from model.methods.suffix.drafter import SuffixConfig, SuffixDrafter
from tests.model.decoded import option_names
from tests.model.methods.suffix.reference_tree import SlowTree

CPU = torch.device("cpu")
VOCAB = 100


def drafter_of(**options: Any) -> SuffixDrafter:
    """Return a drafter."""
    return SuffixDrafter(SuffixConfig(**options), VOCAB, CPU)


def emit(drafter: SuffixDrafter, tokens: list[int]) -> None:
    """Let a drafter observe a step that emitted these tokens."""
    path = list(range(len(tokens)))
    acceptance = Acceptance(path, tokens, [0], [0], Candidates([[0]], [[0.0]]))
    drafter.observe(VerifiedStep(DraftTree.chain([0]), acceptance, None))


def draft(
    drafter: SuffixDrafter, text: Sequence[int], budget: DraftBudget | None = None
) -> tuple[list[int], list[int]]:
    """Return the drafted tokens after a text, and their parents, -1 for the root."""
    tree = drafter.propose(text, budget or DraftBudget(1000))
    assert int(tree.token_ids[0]) == text[-1]
    return tree.token_ids[1:].tolist(), [parent - 1 for parent in tree.topology.parents[1:]]


def chain(*tokens: int) -> tuple[list[int], list[int]]:
    """Return a chain as `draft` does."""
    return list(tokens), list(range(-1, len(tokens) - 1))


@pytest.mark.parametrize("shape", ["path", "tree"])
def test_a_trace_of_the_authors_library(shape: str) -> None:
    """Worked out from csrc/suffix_decoding/suffix_tree.cc of ArcticInference 0.3.0, which gives the same drafts."""
    suffix = drafter_of(shape=shape, max_cached_answers=2)
    text = [1, 2, 3, 4, 1, 2, 5, 1, 2]
    suffix.start(text)
    # "1 2" occurs three times, this end included, so that 3 and 5 have 1/3 each. It is two tokens long and
    # may draft two, which score 2/3; "2" may draft one. A path takes the child that came first.
    assert draft(suffix, text) == (chain(3, 4) if shape == "path" else ([3, 5], [-1, -1]))
    emit(suffix, [3, 4])
    text += [3, 4]
    # "1 2 3 4" occurs twice: four tokens of 1/2, the end again counted. So does "3 4", but may draft two.
    assert draft(suffix, text) == chain(1, 2, 5, 1)
    assert draft(suffix, text, DraftBudget(3)) == chain(1, 2, 5)
    emit(suffix, [6, 7, 8])
    text += [6, 7, 8]
    assert draft(suffix, text) == chain(), "8 is new"

    text = [9, 3]
    suffix.start(text)
    # The answer before was 3 4 6 7 8. The end of a prompt is in no answer: "3" went on with 4 always.
    assert draft(suffix, text) == chain(4)
    emit(suffix, [4])
    text += [4]
    # "3 4" occurs in it once, though 3 is of the prompt; "4" has occurred twice by now, 6 followed in half.
    assert draft(suffix, text) == chain(6, 7)
    emit(suffix, [6, 9])
    text += [6, 9]
    # Only the prompt holds 9; of its two places one is the end.
    assert draft(suffix, text) == chain(3)

    suffix.start([4])
    # A third answer: the first one leaves. The whole text is no suffix that is looked up.
    assert draft(suffix, [4]) == chain()
    emit(suffix, [6])
    # The answer 4 6 9 is left, so that 9 has 1/2; 7 left with the first one.
    assert draft(suffix, [4, 6]) == chain(9)


def test_a_tree_takes_the_most_probable_tokens_of_all_branches() -> None:
    suffix = drafter_of(shape="tree", max_spec_factor=10.0, min_token_prob=0.2)
    text = [1, 2, 3, 50, 1, 2, 3, 51, 1, 2, 4, 52, 1, 5, 53, 1]
    suffix.start(text)
    # "1" occurs five times: 2 in 3/5, then 3 in 2/5, and with 1/5 each 5 53 1, 4 52 1 5 53 1 and so on.
    tokens, parents = draft(suffix, text, DraftBudget(3))
    assert (tokens, parents) == ([2, 3, 5], [-1, 0, -1])
    tokens, parents = draft(suffix, text)
    assert len(tokens) == 10 and tokens[:2] == [2, 3]
    assert draft(drafter_of(shape="tree", min_token_prob=0.7), text) == chain()
    only_chain = draft(suffix, text, DraftBudget(1000, chain_only=True))
    assert only_chain[1] == list(range(-1, len(only_chain[0]) - 1))


@pytest.mark.parametrize("seed", range(30))
def test_paths_are_those_of_a_slow_search(seed: int) -> None:
    source = random.Random(seed)
    depth, factor, least = source.choice([4, 8, 64]), source.choice([1.0, 2.5]), 0.15
    nodes, kept = source.choice([3, 64]), source.choice([0, 1, 3])
    suffix = drafter_of(
        max_tree_depth=depth,
        max_spec_factor=factor,
        min_token_prob=least,
        num_nodes=nodes,
        max_cached_answers=kept,
    )
    answers, slow_answers = list[list[int]](), SlowTree(depth)
    for _ in range(5):
        text = [source.randrange(4) for _ in range(source.randrange(1, 12))]
        slow_text, answer = SlowTree(depth), list[int]()
        slow_text.add(text)
        suffix.start(text)
        while len(answers) >= max(1, kept):
            slow_answers.remove(answers.pop(0))
        for _ in range(8):
            limit = min(nodes, source.choice([2, 1000]))
            mine = slow_text.best_path(text, limit, factor, least)
            other = slow_answers.best_path(text, limit, factor, least) if kept else ([], 0.0)
            expected = other if other[1] > mine[1] + 1e-9 else mine
            assert draft(suffix, text, DraftBudget(limit)) == chain(*expected[0])
            new = [source.randrange(4) for _ in range(source.randrange(1, 4))]
            emit(suffix, new)
            slow_text.add([*text, *new], len(text))
            slow_answers.add([*answer, *new], len(answer))
            text, answer = text + new, answer + new
        answers.append(answer)


def test_answers_are_kept_up_to_the_bound_and_come_back_from_memory() -> None:
    suffix = drafter_of(max_cached_answers=2)
    for answer in ([1, 2, 3], [4, 5, 6], [7, 8]):
        suffix.start([0])
        emit(suffix, answer)
    memory = suffix.memory()
    assert memory["answers"].tolist() == [4, 5, 6, 7, 8]
    assert memory["lengths"].tolist() == [3, 2]
    assert "2 answers" in suffix.describe()
    heir = drafter_of(max_cached_answers=2)
    heir.load_memory(memory)
    for each in (suffix, heir):
        each.start([0, 7])
        assert draft(each, [0, 7]) == chain(8)
        assert draft(each, [0, 4]) == chain(), "the oldest of them left when a new one began"
    heir.start([0])
    assert heir.memory()["lengths"].tolist() == [2], "an answer without a token is none"


@pytest.mark.parametrize(
    ("answers", "lengths", "reason"),
    [
        (torch.tensor([1, 2]), torch.tensor([2]), "int32"),
        (torch.tensor([[1]]).int(), torch.tensor([1]), "dimension"),
        (torch.tensor([1, 2]).int(), torch.tensor([3]), "add up"),
        (torch.tensor([1, 2]).int(), torch.tensor([], dtype=torch.int64), "add up"),
        (torch.tensor([1, 2]).int(), torch.tensor([2, 0]), "add up"),
        (torch.tensor([1, 2, 3]).int(), torch.tensor([1, 1, 1]), "at most 2"),
        (torch.tensor([VOCAB]).int(), torch.tensor([1]), "vocabulary"),
    ],
)
def test_answers_that_do_not_fit_are_refused(
    answers: torch.Tensor, lengths: torch.Tensor, reason: str
) -> None:
    suffix = drafter_of(max_cached_answers=2)
    with pytest.raises(ValueError, match=reason):
        suffix.load_memory({"answers": answers, "lengths": lengths})


@pytest.mark.parametrize("name", ["max_spec_factor", "max_spec_offset", "min_token_prob"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}: got .*allowed"):
        SuffixConfig(**{name: value})


def test_its_documented_options_keep_their_names() -> None:
    documented = {"--num-nodes", "--max-spec-factor", "--min-token-prob", "--max-cached-answers"}
    assert documented <= option_names(SuffixConfig)
