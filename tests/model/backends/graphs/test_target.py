"""Static shapes: padding changes no logits, and tokens are those of `generate`.

Run: pytest tests/model/backends/graphs/test_target.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import model.backends.graphs.captured
from model.backends.graphs.captured import length_bucket, node_bucket
from model.backends.graphs.graphed_target import GraphedTarget
from model.backends.passes.static_cache import PassInputs, SequenceNodes
from model.backends.proofs.self_test import Probe, expected_logits, self_test, verified_logits
from model.backends.proofs.support import UnsupportedModelError
from model.backends.target import TargetModel
from model.budget.measure import step_costs
from model.engine.loop import generate
from model.engine.tree import DraftTree
from model.methods import METHODS, drafter_class
from tests.model.decoded import drafter_for, known, random_ids, referee
from tests.model.engine.test_near_ties import VOCAB_SIZE, model_with_twins, tokens_of
from tests.model.families.families import CHAINS
from tests.model.families.families_with_trees import TREES
from tests.model.families.family import Family
from tests.model.families.test_families import PREFIX_LENGTH, TOLERANCE
from tests.pairs import pairs

LLAMA = "Llama, grouped heads"
SMALL = Family("small", "LlamaConfig", {"num_hidden_layers": 1})
NUM_NEW = 40


def test_buckets_hold_what_they_are_asked_for() -> None:
    sizes = range(1, 400)
    assert all(node_bucket(size) >= size for size in sizes)
    assert all(
        node_bucket(size) - size < model.backends.graphs.captured.NODE_STEP for size in sizes
    )
    assert [node_bucket(size) for size in (1, 9, 81, 129)] == [1, 16, 88, 192]
    assert all(length_bucket(size) >= size for size in sizes)
    assert [length_bucket(size) for size in (1, 512, 513, 1025)] == [512, 512, 1024, 2048]


@pytest.mark.parametrize(
    "name", [family.name for family in TREES if family.expected == "trees" and family.is_known]
)
def test_padded_nodes_have_the_logits_of_plain_passes(name: str) -> None:
    target = GraphedTarget(known(name).build())
    probe = Probe.random(target.vocab_size, False, PREFIX_LENGTH)
    with torch.inference_mode():
        error = (verified_logits(target, probe) - expected_logits(target, probe)).abs().max()
        spread = expected_logits(target, probe).std()
    assert float(error / spread) <= TOLERANCE


def test_a_node_that_sees_padding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    target = GraphedTarget(known(LLAMA).build())
    upload = PassInputs.upload

    def seen(inputs: PassInputs, texts: dict[int, SequenceNodes], *others: Any) -> None:
        upload(inputs, texts, *others)
        inputs.sees[0, 0, texts[0].tree.topology.num_nodes :] = True

    monkeypatch.setattr(PassInputs, "upload", seen)
    with pytest.raises(UnsupportedModelError, match="not lossless"):
        self_test(target)


@pytest.mark.parametrize(
    ("method", "name"),
    pairs(
        [name for name in METHODS if drafter_class(name).drafts_with() != "heads"],
        [LLAMA, "Qwen2, sliding window", "DeepSeek-V3"],
    ),
)
def test_tokens_equal_generate_across_buckets(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.backends.graphs.captured, "SHORTEST_LENGTH", 16)
    target = GraphedTarget(known(name).build())
    for prompt in ([5], random_ids(28)):
        answer = generate(target, drafter_for(method, target), prompt, max_new_tokens=NUM_NEW)
        assert answer.token_ids == referee(target, prompt, NUM_NEW)
    lengths = {length for _, length in target.known_shapes}
    assert len(lengths) >= 2, "no text grew over the end of a bucket"


def test_sizes_of_an_automatic_budget_are_warmed_up() -> None:
    target = GraphedTarget(SMALL.build())
    drafter = drafter_for("recycling-averaged", target, tree_version="auto")
    generate(target, drafter, [5], max_new_tokens=2)  # asks for costs
    target.warm_up(100)
    buckets = {node_bucket(size) for size in step_costs(target).sizes}
    assert buckets <= {nodes for nodes, _ in target.known_shapes}


@pytest.mark.parametrize("name", [family.name for family in CHAINS if family.is_known])
def test_models_without_tree_masks_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        self_test(GraphedTarget(known(name).build()))
    assert "\n" not in str(error.value)


def test_a_model_on_two_devices_is_refused() -> None:
    loaded = known(LLAMA).build()
    loaded.elsewhere = nn.Parameter(torch.empty(1, device="meta"))
    with pytest.raises(UnsupportedModelError, match="spread over 2 devices"):
        GraphedTarget(loaded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target_class", [TargetModel, GraphedTarget])
def test_half_precision_stays_within_its_noise(
    target_class: type[TargetModel], dtype: torch.dtype
) -> None:
    target = target_class(known(LLAMA).build().to(dtype))
    self_test(target, PREFIX_LENGTH)
    assert not target.chain_only, target.chain_reason
    prompt = random_ids(28)
    plain = generate(target, drafter_for("vanilla", target), prompt, max_new_tokens=NUM_NEW)
    drafted = generate(
        target, drafter_for("recycling-averaged", target), prompt, max_new_tokens=NUM_NEW
    )
    pairs = list(zip(plain.token_ids, drafted.token_ids, strict=True))
    differing = [index for index, (one, other) in enumerate(pairs) if one != other]
    if differing:
        text = torch.tensor([prompt + plain.token_ids[: differing[0]]])
        logits = target.model.float()(text).logits[0, -1]
        one, other = pairs[differing[0]]
        noise = 16 * torch.finfo(dtype).eps * float(logits.abs().max())
        assert abs(float(logits[one] - logits[other])) <= noise
    assert sum(drafted.accept_lengths) == NUM_NEW


def test_tokens_do_not_depend_on_what_a_cache_held_before() -> None:
    target = GraphedTarget(known(LLAMA).build())
    prompt = random_ids(28)
    first = generate(
        target, drafter_for("recycling-averaged", target), prompt, max_new_tokens=NUM_NEW
    )
    assert target._storage is not None
    for tensor in target._storage.buffers:
        tensor.fill_(float("nan"))
    second = generate(
        target, drafter_for("recycling-averaged", target), prompt, max_new_tokens=NUM_NEW
    )
    assert second.token_ids == first.token_ids


def test_near_ties_fall_as_in_plain_decoding() -> None:
    for seed in range(3):
        target = GraphedTarget(model_with_twins(seed, stride=2).model)
        prompt = random_ids(30, seed, VOCAB_SIZE)
        plain = tokens_of(target, "vanilla", prompt)
        assert tokens_of(target, "recycling-averaged", prompt) == plain
        assert tokens_of(target, "pld", prompt) == plain


@torch.inference_mode()
def test_two_texts_at_a_time_have_rows_of_their_own() -> None:
    target = GraphedTarget(known(LLAMA).build())
    tree = DraftTree.chain([3])
    first, second = target.new_cache(40), target.new_cache(40)
    alone = target.forward(tree, first)
    for _ in target.prefill(random_ids(9), second, with_logits=False):
        pass
    first.keep(0, ())
    torch.testing.assert_close(target.forward(tree, first), alone, rtol=0, atol=0)
    copied = target.new_cache(40)
    copied.copy_rows(second, 8)
    torch.testing.assert_close(target.forward(tree, copied), target.forward(tree, second))
    storage = copied.storage
    del copied, first
    assert target.new_cache(40).storage is storage, "rows of the last text are not used again"
