"""Sampling is ancestral sampling: the same text as plain decoding from the same random numbers; where drafts
are drawn, another draw from the same distribution. Texts' distributions are checked in
tests/evaluation/checking/test_sampling_check.py.

Run: pytest tests/model/engine/test_rules.py
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from scipy import stats

from model.engine.draws import draw_along, draw_among
from model.engine.loop import generate
from model.engine.rules import Processor, SamplingRule, sampling_processors
from model.engine.tree import Drawn
from tests.model.decoded import SEEDED, drafter_for, random_ids, target_of
from tests.pairs import pairs

SETTINGS = [(1.0, 0, 1.0), (0.7, 0, 0.9), (1.5, 12, 1.0)]


@pytest.mark.parametrize(("method", "setting"), pairs(SEEDED, SETTINGS, each=2))
def test_one_generator_gives_one_text_whatever_the_method(
    method: str, setting: tuple[float, int, float]
) -> None:
    texts = texts_of(method, setting)
    assert texts == plain_texts(setting)
    assert len({tuple(text) for text in texts}) == 3, "three draws gave the same text"


@cache
def plain_texts(setting: tuple[float, int, float]) -> list[list[int]]:
    """Return those of plain decoding."""
    return texts_of("vanilla", setting)


def texts_of(method: str, setting: tuple[float, int, float]) -> list[list[int]]:
    """Return three texts, each with the generator where the one before left it."""
    target = target_of("Llama, grouped heads")
    rule = SamplingRule(sampling_processors(*setting), torch.Generator().manual_seed(11))
    drafter = drafter_for(method, target)  # the loop of recycling goes on unseen
    answers = [
        generate(target, drafter, random_ids(9), max_new_tokens=30, eos_ids=[4], rule=rule)
        for _ in range(3)
    ]
    return [answer.token_ids for answer in answers]


def test_sampling_processors_are_the_warpers_asked_for() -> None:
    names = [type(processor).__name__ for processor in sampling_processors(0.7, 5, 0.9)]
    assert names == ["TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"]
    assert sampling_processors(1.0, 0, 1.0) == []


def chosen(rule: SamplingRule, logits: torch.Tensor, drawn: Drawn, num_children: int) -> int:
    """Return the token that is chosen where this many children were drawn, none twice, from their distribution."""
    probabilities = torch.tensor(drawn.probabilities)
    places = torch.multinomial(probabilities, num_children, generator=rule.generator)
    children = [drawn.token_ids[place] for place in places.tolist()]
    return draw_among(rule, logits, [0], children, drawn)


@pytest.mark.parametrize("num_children", [1, 2, 4])
@pytest.mark.parametrize("processors", [[], sampling_processors(0.6, 0, 0.9)])
def test_drawn_children_leave_the_distribution_as_it_is(
    num_children: int, processors: list[Processor]
) -> None:
    logits = torch.tensor([1.0, 0.2, -1.0, 0.7, 0.0, -3.0])
    drawn = Drawn([4, 0, 2, 3], [0.4, 0.3, 0.2, 0.1])
    rule = SamplingRule(processors, torch.Generator().manual_seed(5))
    counts = Counter(chosen(rule, logits, drawn, num_children) for _ in range(8000))
    exact = SamplingRule(processors).probabilities(logits, [0]).tolist()
    assert all(exact[token] > 0 for token in counts)
    seen = {token: share for token, share in enumerate(exact) if share > 0}
    found = stats.chisquare(
        [counts[token] for token in seen],
        [8000 * share / sum(seen.values()) for share in seen.values()],
    )
    assert found.pvalue > 1e-4, found


@pytest.mark.parametrize("processors", [[], sampling_processors(0.6, 0, 0.9)])
def test_a_drawn_chain_leaves_the_distribution_of_texts_as_it_is(
    processors: list[Processor],
) -> None:
    """Texts of three tokens: a chain of two drawn ones is judged, then plain draws follow."""
    size, length = 4, 3
    source = torch.Generator().manual_seed(0)
    table = torch.randn(size, size, generator=source)  # logits after each token
    guesses = torch.randn(size, size, generator=source).softmax(-1)  # what drafts are drawn from
    rule = SamplingRule(processors, torch.Generator().manual_seed(5))

    def text() -> tuple[int, ...]:
        chain, drawn = [0], []
        for _ in range(2):
            row = guesses[chain[-1]]
            drawn.append(Drawn(range(size), row.tolist()))
            chain.append(int(torch.multinomial(row, 1, generator=rule.generator)))
        found = draw_along(rule, table[chain], [0], chain[1:], drawn)
        while len(found) < length:
            found.append(rule.choose(table[found[-1]], [0, *found]))
        return tuple(found[:length])

    counts = Counter(text() for _ in range(12000))
    exact = {(): 1.0}
    for _ in range(length):
        exact = {
            (*done, token): chance * share
            for done, chance in exact.items()
            for token, share in enumerate(
                rule.probabilities(table[done[-1] if done else 0], [0]).tolist()
            )
            if share > 0
        }
    assert set(counts) <= set(exact)
    common = [one for one, chance in exact.items() if 12000 * chance >= 5]
    seen = [counts[one] for one in common]
    wanted = [exact[one] / sum(exact[each] for each in common) * sum(seen) for one in common]
    assert len(common) > 8 and stats.chisquare(seen, wanted).pvalue > 1e-4


def test_a_chain_drawn_from_the_models_own_distribution_is_accepted_whole() -> None:
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
    drawn = [Drawn(range(5), row.softmax(-1).tolist()) for row in logits[:3]]
    rule = SamplingRule([], torch.Generator().manual_seed(1))
    for tokens in ([0, 1, 2], [4, 4, 4]):
        assert draw_along(rule, logits, [0], tokens, drawn)[:3] == tokens


def test_a_child_drawn_from_the_models_own_distribution_is_always_accepted() -> None:
    logits = torch.tensor([1.0, 0.5, 0.0])
    own = logits.softmax(-1).tolist()
    rule = SamplingRule([], torch.Generator().manual_seed(1))
    for token in (0, 1, 2) * 20:
        assert draw_among(rule, logits, [0], [token], Drawn([0, 1, 2], own)) == token
    # A token that the model would not take is not taken, however sure the draft.
    never = torch.tensor([-torch.inf, 0.0, 0.0])
    for _ in range(20):
        assert draw_among(rule, never, [0], [0], Drawn([0], [1.0])) in (1, 2)
    assert sampling_rule_at(0.5).temperature == 0.5 and SamplingRule([]).temperature == 1


def sampling_rule_at(temperature: float) -> SamplingRule:
    return SamplingRule(sampling_processors(temperature, 0, 1.0))
