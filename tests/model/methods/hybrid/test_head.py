"""Trained heads as one more source of the hybrid: their guesses are drafted, and the text stays the model's.

Run: pytest tests/model/methods/hybrid/test_head.py
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from model.budget.best_first import ANY_TOKEN, Guesses
from model.engine.budget import DraftBudget
from model.engine.loop import generate
from model.engine.sequence import Request, RunningSequence
from model.engine.step import StepTimer
from model.methods.hybrid.candidate_pool import CandidatePool
from model.methods.hybrid.drafter import GUIDES, HybridConfig, HybridDrafter
from tests.model.decoded import heads_folder, random_ids, referee, target_of

LLAMA = "Llama, grouped heads"
CPU = torch.device("cpu")
ROOMY = DraftBudget(9)
PROMPT = random_ids(3, 20)


def with_head(method: str, **options: Any) -> HybridDrafter:
    """Return a hybrid with random heads of a method for the shared model."""
    target = target_of(LLAMA)
    folder = heads_folder(method, target.config)
    config = HybridConfig(**{"budget": "fixed", "head": f"{method}={folder}"} | options)
    drafter = HybridDrafter(config, target.vocab_size, CPU)
    drafter.check_target(target)
    return drafter


@pytest.mark.parametrize("method", GUIDES)
def test_the_text_is_that_of_generate_whatever_heads_guess(method: str) -> None:
    target, drafter = target_of(LLAMA), with_head(method, num_nodes=7)
    first = generate(target, drafter, PROMPT, max_new_tokens=40)
    assert first.token_ids == referee(target, PROMPT, 40)
    sources = {name for step in first.steps for name in (step.tree.sources or ())[1:]}
    assert "guide" in sources, "the heads' guesses were drafted"
    drafter.reset()
    again = generate(target, drafter, PROMPT, max_new_tokens=40)
    fresh = generate(target, with_head(method, num_nodes=7), PROMPT, max_new_tokens=40)
    assert again.accept_lengths == fresh.accept_lengths == first.accept_lengths


@torch.inference_mode()
def test_heads_read_on_in_steps_without_a_draft() -> None:
    target, drafter = target_of(LLAMA), with_head("eagle")
    text = RunningSequence(target, drafter, Request(PROMPT, 30).checked(target))
    for _ in text.read_prompt():
        pass
    while text.stop_reason is None:
        tree = text.pause() if text.num_new % 2 else text.propose()
        text.conclude(tree, *text.forward(tree), StepTimer())
    assert text.tokens[len(PROMPT) :] == referee(target, PROMPT, 30)


def test_siblings_have_heads_of_their_own_text() -> None:
    target, first = target_of(LLAMA), with_head("eagle3", num_nodes=7)
    second = first.sibling()
    for drafter, prompt in ((first, PROMPT), (second, random_ids(12, 2))):
        found = generate(target, drafter, prompt, max_new_tokens=20)
        assert found.token_ids == referee(target, prompt, 20)
    assert first._head is not second._head and first._pool is not second._pool


def pool_of(*tokens: int) -> CandidatePool:
    pool = CandidatePool(2**8, 2, 50)
    pool.start(tokens)
    return pool


def test_a_guide_is_followed_along_its_tree_until_the_text_goes_on() -> None:
    pool, sure, rare = pool_of(1, 2), math.log(0.9), math.log(0.01)
    rows = [[7, 8], [9, 10], [11, 12]]
    guesses = Guesses([2, 7, ANY_TOKEN], [-1, 0, 1], rows, [[sure, rare]] * 3)
    pool.guide(guesses)
    tree = pool.grow(2, 3, ROOMY)
    assert tree.token_ids.tolist() == [2, 7, 9, 11], "the third row serves whatever follows 7"
    assert tree.sources is not None and set(tree.sources[1:]) == {"guide"}
    pool.append([7])
    sources = pool.grow(7, 3, ROOMY).sources
    assert sources is not None and "guide" not in sources, "it spoke of the text before"
    pool.guide(guesses)
    pool.start([1, 2])
    sources = pool.grow(2, 3, ROOMY).sources
    assert sources is not None and "guide" not in sources, "and so it is with another text"


def test_what_the_text_says_too_is_more_probable() -> None:
    row = Guesses([2], [-1], [[7, 8]], [[math.log(0.4), math.log(0.4)]])
    alone, both = pool_of(1, 2), pool_of(2, 8, 3, 2)
    for pool in (alone, both):
        pool.guide(row)
    assert alone.grow(2, 1, ROOMY).token_ids.tolist() == [2, 8], "the larger id, of equals"
    tree = both.grow(2, 1, ROOMY)
    assert tree.token_ids.tolist() == [2, 8] and tree.sources == ("rows", "guide and text")
    gains = [pool.offer(2, 2, ROOMY, 0.0)[0] for pool in (alone, both)]
    assert gains[1] > gains[0]


@pytest.mark.parametrize("words", ["eagle3", "eagle3=", "goose=folder", "hydra=folder", "x=y"])
def test_words_that_name_no_heads_are_refused(words: str) -> None:
    with pytest.raises(
        ValueError, match=r"head: got .*METHOD one of medusa, eagle, eagle2, eagle3"
    ):
        HybridDrafter(HybridConfig(head=words), 50, CPU)
    with pytest.raises(ValueError, match="none"):
        HybridDrafter(HybridConfig(head="eagle=none"), 50, CPU)


def test_memory_fits_with_and_without_heads() -> None:
    target = target_of(LLAMA)
    plain, guided = HybridDrafter(HybridConfig(), target.vocab_size, CPU), with_head("medusa")
    generate(target, guided, PROMPT, max_new_tokens=20)
    learned = guided.memory()
    plain.load_memory(learned)
    assert all(torch.equal(value, learned[name]) for name, value in plain.memory().items())
