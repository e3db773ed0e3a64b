"""Long texts: the cache is as large as the text needs, and 16,000 tokens decode exactly.

Run: pytest tests/model/engine/test_long_context.py
"""

from __future__ import annotations

import pytest
import torch

from model.backends.graphs.captured import NODE_STEP, length_bucket
from model.backends.graphs.graphed_target import GraphedTarget
from model.backends.target import TargetModel
from model.engine.loop import generate
from tests.model.decoded import drafter_for, random_ids, referee
from tests.model.families.family import Family

CONTEXT = 2**17
LLAMA = Family("long", "LlamaConfig", {"num_hidden_layers": 1, "max_position_embeddings": CONTEXT})
BYTES_PER_ROW = 2 * 2 * 8 * 4  # keys and values, two heads of eight dimensions, float32
NUM_NEW = 24


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    """Return 16,000 tokens whose end repeats, so that drafts come from far back."""
    text = random_ids(15_900)
    return [*text, *text[100:200]]


@pytest.fixture(scope="module")
def expected(prompt: list[int]) -> list[int]:
    """Return transformers' tokens."""
    return referee(TargetModel(LLAMA.build()), prompt, NUM_NEW)


@pytest.mark.parametrize("target_class", [TargetModel, GraphedTarget])
def test_long_texts_equal_generate(
    target_class: type[TargetModel], prompt: list[int], expected: list[int]
) -> None:
    target = target_class(LLAMA.build())
    for method in ("recycling-averaged", "pld"):
        answer = generate(target, drafter_for(method, target), prompt, max_new_tokens=NUM_NEW)
        assert answer.token_ids == expected, method


def test_the_cache_is_as_large_as_the_text_not_as_the_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = TargetModel(LLAMA.build())
    asked: list[int] = []
    new_cache = target.new_cache
    monkeypatch.setattr(target, "new_cache", lambda rows: asked.append(rows) or new_cache(rows))
    drafter = drafter_for("recycling-averaged", target)
    generate(target, drafter, random_ids(50), max_new_tokens=10)
    assert asked == [50 + 10 + drafter.max_nodes]
    assert new_cache(asked[0]).num_bytes == asked[0] * BYTES_PER_ROW


@torch.inference_mode()
@pytest.mark.parametrize("capacity", [100, 5000])
def test_static_rows_are_those_of_the_texts_bucket(capacity: int) -> None:
    cache = GraphedTarget(LLAMA.build()).new_cache(capacity)
    assert cache.num_bytes == length_bucket(capacity + NODE_STEP) * BYTES_PER_ROW
    assert cache.capacity >= capacity
