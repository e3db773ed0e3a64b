"""Static shapes: padding changes no logits, and a growing text compiles nothing again.

Run: pytest tests/model/compiled/test_target.py
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import model.compiled.target
from model.budget.cost_model import CostModel
from model.budget.measure import NAME, step_costs
from model.compiled.shape import CompiledShape
from model.compiled.target import CompiledTarget, StaticTarget, length_bucket, node_bucket
from model.engine.loop import generate
from model.engine.self_test import Probe, expected_logits, self_test, verified_logits
from model.engine.target import TargetModel, UnsupportedModelError
from model.engine.tree import DraftTree, TreeTopology
from model.kernels import short_pass as few_rows
from model.kernels.short_pass import short_pass_kernel
from model.methods.registry import METHODS, drafter_class
from tests.model.decoded import drafter_for, known, random_ids, referee
from tests.model.engine.test_near_ties import VOCAB_SIZE, model_with_twins, tokens_of
from tests.model.families.families import CHAINS
from tests.model.families.families_with_trees import TREES
from tests.model.families.family import IS_VERSION_4, Family
from tests.model.families.test_families import PREFIX_LENGTH, TOLERANCE
from tests.pairs import pairs

LLAMA = "Llama, grouped heads"
SMALL = Family("small", "LlamaConfig", {"num_hidden_layers": 1})
NUM_NEW = 40


@pytest.fixture
def compiled() -> Iterator[CompiledTarget]:
    """Return a target whose steps are traced without generating code."""
    torch._dynamo.reset()
    yield CompiledTarget(SMALL.build(), backend="eager")
    torch._dynamo.reset()


def num_compiled() -> int:
    """Return how many graphs have been compiled in this process."""
    return counters["stats"]["unique_graphs"]


def test_buckets_hold_what_they_are_asked_for() -> None:
    sizes = range(1, 400)
    assert all(node_bucket(size) >= size for size in sizes)
    assert all(node_bucket(size) - size < model.compiled.target.NODE_STEP for size in sizes)
    assert [node_bucket(size) for size in (1, 9, 81, 129)] == [1, 16, 88, 192]
    assert all(length_bucket(size) >= size for size in sizes)
    assert [length_bucket(size) for size in (1, 512, 513, 1025)] == [512, 512, 1024, 2048]


@pytest.mark.parametrize(
    "name", [family.name for family in TREES if family.expected == "trees" and family.is_known]
)
def test_padded_nodes_have_the_logits_of_plain_passes(name: str) -> None:
    target = StaticTarget(known(name).build())
    probe = Probe.random(target.vocab_size, False, PREFIX_LENGTH)
    with torch.inference_mode():
        error = (verified_logits(target, probe) - expected_logits(target, probe)).abs().max()
        spread = expected_logits(target, probe).std()
    assert float(error / spread) <= TOLERANCE


def test_a_node_that_sees_padding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    target = StaticTarget(known(LLAMA).build())
    padded = target.padded_topology

    def seen(topology: TreeTopology) -> tuple[torch.Tensor, torch.Tensor]:
        depths, mask = padded(topology)
        mask[0, topology.num_nodes :] = 0
        return depths, mask

    monkeypatch.setattr(target, "padded_topology", seen)
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
    monkeypatch.setattr(model.compiled.target, "SHORTEST_LENGTH", 16)
    target = StaticTarget(known(name).build())
    for prompt in ([5], random_ids(28)):
        answer = generate(target, drafter_for(method, target), prompt, max_new_tokens=NUM_NEW)
        assert answer.token_ids == referee(target, prompt, NUM_NEW)
    lengths = {length for _, length in target.known_shapes}
    assert len(lengths) >= 2, "no text grew over the end of a bucket"


@pytest.mark.parametrize("method", ["recycling", "pld"])
def test_compiled_steps_give_the_tokens_of_generate(method: str, compiled: CompiledTarget) -> None:
    prompt = random_ids(28)
    answer = generate(compiled, drafter_for(method, compiled), prompt, max_new_tokens=NUM_NEW)
    assert answer.token_ids == referee(compiled, prompt, NUM_NEW)


@pytest.mark.parametrize("name", [LLAMA, "Qwen2, sliding window", "DeepSeek-V3", "Gemma 3n text"])
def test_lengths_of_any_family_may_be_symbols(name: str) -> None:
    if IS_VERSION_4 and name in ("DeepSeek-V3", "Gemma 3n text"):
        pytest.skip(f"{name} of transformers 4 asks the device for numbers while it runs")
    torch._dynamo.reset()
    target = CompiledTarget(known(name).build(), backend="eager")
    drafter = drafter_for("recycling", target, tree_version="2.2.2")
    before = num_compiled()
    for prompt in ([5], random_ids(80)):
        answer = generate(target, drafter, prompt, max_new_tokens=30)
        assert answer.token_ids == referee(target, prompt, 30)
    assert num_compiled() - before == len(target.known_shapes), "a length has its own code"
    torch._dynamo.reset()


def test_a_growing_text_is_compiled_once(
    compiled: CompiledTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.compiled.target, "SHORTEST_LENGTH", 64)
    drafter = drafter_for("vanilla", compiled)
    before = num_compiled()
    generate(compiled, drafter, random_ids(3), max_new_tokens=60)
    assert num_compiled() == before + 1
    generate(compiled, drafter, random_ids(30), max_new_tokens=30)
    assert num_compiled() == before + 1, "another text in the same bucket was compiled anew"
    held = compiled.new_cache(300)
    generate(compiled, drafter, random_ids(30), max_new_tokens=30)
    assert held.storage is not compiled._storage
    assert num_compiled() == before + 1, "rows at another address were compiled anew"
    generate(compiled, drafter, random_ids(30), max_new_tokens=60)
    assert num_compiled() == before + 1, "a longer text was compiled anew"


def test_nothing_is_compiled_after_a_warm_up(compiled: CompiledTarget) -> None:
    drafter = drafter_for("recycling", compiled, tree_version="2.2.2")
    generate(compiled, drafter, [5], max_new_tokens=2)
    compiled.warm_up(600, [8])
    before = num_compiled()
    for length in (20, 480):
        generate(compiled, drafter, random_ids(length), max_new_tokens=30)
    assert num_compiled() == before
    assert compiled.num_late == 0
    generate(compiled, drafter_for("pld", compiled), [1, 2, 3] * 5, max_new_tokens=30)
    assert compiled.num_late > 0, "shapes outside the warm-up are not counted"


def test_sizes_of_an_automatic_budget_are_warmed_up(compiled: CompiledTarget) -> None:
    drafter = drafter_for("recycling", compiled, tree_version="auto")
    generate(compiled, drafter, [5], max_new_tokens=2)  # asks for costs
    compiled.warm_up(100)
    buckets = {node_bucket(size) for size in step_costs(compiled).sizes}
    assert buckets <= {nodes for nodes, _ in compiled.known_shapes}


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile on a CPU needs g++")
@pytest.mark.parametrize(
    ("method", "options", "has_kernels"),
    [("recycling", {}, False), ("recycling", {}, True), ("hybrid", {"num_nodes": 7}, True)],
)
def test_generated_code_is_exact(
    method: str, options: dict[str, int], has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernels:
        monkeypatch.setattr(few_rows, "is_available", lambda: False)
    elif not short_pass_kernel():
        pytest.skip("the kernels for few rows cannot be built here")
    monkeypatch.setattr(
        "model.kernels.largest_logits.WIDE", 1
    )  # a small vocabulary, too, is for the kernel
    torch._dynamo.reset()
    target = CompiledTarget(SMALL.build())
    drafter = drafter_for(method, target, **options)
    prompt = random_ids(28)
    answer = generate(target, drafter, prompt, max_new_tokens=24)
    assert answer.token_ids == referee(target, prompt, 24)
    assert len(answer.steps) < 24, "no draft was accepted: the equality says nothing"
    again = {function for function, _ in target._known}
    assert again >= {*target._functions.values(), *target._moves.values()}, "torch is asked again"
    assert again
    torch._dynamo.reset()


@pytest.mark.parametrize("name", [family.name for family in CHAINS if family.is_known])
def test_models_without_tree_masks_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        self_test(StaticTarget(known(name).build()))
    assert "\n" not in str(error.value)


def test_a_model_on_two_devices_is_refused() -> None:
    loaded = known(LLAMA).build()
    loaded.elsewhere = nn.Parameter(torch.empty(1, device="meta"))
    with pytest.raises(UnsupportedModelError, match="spread over 2 devices"):
        StaticTarget(loaded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target_class", [TargetModel, StaticTarget])
def test_half_precision_stays_within_its_noise(
    target_class: type[TargetModel], dtype: torch.dtype
) -> None:
    target = target_class(known(LLAMA).build().to(dtype))
    self_test(target, PREFIX_LENGTH)
    assert not target.chain_only, target.chain_reason
    prompt = random_ids(28)
    plain = generate(target, drafter_for("vanilla", target), prompt, max_new_tokens=NUM_NEW)
    drafted = generate(target, drafter_for("recycling", target), prompt, max_new_tokens=NUM_NEW)
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
    target = StaticTarget(known(LLAMA).build())
    prompt = random_ids(28)
    first = generate(target, drafter_for("recycling", target), prompt, max_new_tokens=NUM_NEW)
    assert target._storage is not None
    for tensor in target._storage.buffers:
        tensor.fill_(float("nan"))
    second = generate(target, drafter_for("recycling", target), prompt, max_new_tokens=NUM_NEW)
    assert second.token_ids == first.token_ids


@pytest.mark.parametrize("method", ["recycling", "pld"])
def test_a_model_that_changes_between_texts_is_compiled_anew(
    method: str, compiled: CompiledTarget
) -> None:
    drafter, prompt = drafter_for(method, compiled), random_ids(28)

    def answer() -> list[int]:
        return generate(compiled, drafter, prompt, max_new_tokens=NUM_NEW).token_ids

    before = answer()
    assert answer() == before, "the code of the first text"
    attentions = [layer.self_attn for layer in compiled.model.model.layers]
    scaling = attentions[0].scaling  # a number, and part of the code
    try:
        for attention in attentions:
            attention.scaling = 20 * scaling
        assert answer() == referee(compiled, prompt, NUM_NEW) != before
    finally:
        for attention in attentions:
            attention.scaling = scaling
    assert answer() == before


def test_torch_is_asked_once_in_a_text_for_every_length(
    compiled: CompiledTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.compiled.target, "SHORTEST_LENGTH", 16)
    num_asked = 0

    def counted(self: CompiledShape, *given: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        return through_torch(self, *given)

    through_torch = CompiledShape._through_torch
    monkeypatch.setattr(CompiledShape, "_through_torch", counted)
    prompt = random_ids(28)
    for text in range(3):
        num_asked = 0
        steps = generate(
            compiled, drafter_for("vanilla", compiled), prompt, max_new_tokens=40
        ).steps
        lengths = {compiled._length_shown(num_rows) for num_rows in range(28, 28 + 40)}
        assert 1 < len(lengths) < len(steps)
        assert num_asked == (1 if text else len(lengths)), "one says that all are as they were"


def test_what_compiles_says_nothing_about_costs(
    compiled: CompiledTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[int] = []
    learn = CostModel.learn

    def counted(self: CostModel, num_nodes: int, *others: int) -> None:
        learned.append(num_nodes)
        learn(self, num_nodes, *others)

    monkeypatch.setattr(CostModel, "learn", counted)
    compiled.measured[NAME] = CostModel((1, 8), (1.0, 1.1), (1.0, 1.1))
    drafter = drafter_for("pld", compiled, budget="auto")
    for is_first in (True, False):
        learned.clear()
        num_compiled = compiled.num_prepared
        steps = generate(compiled, drafter, random_ids(28), max_new_tokens=NUM_NEW).steps
        num_left_out = len(steps) - len(learned)
        assert num_left_out <= compiled.num_prepared - num_compiled
        assert bool(num_left_out) == is_first


def test_near_ties_fall_as_in_plain_decoding() -> None:
    for seed in range(3):
        target = StaticTarget(model_with_twins(seed, stride=2).model)
        prompt = random_ids(30, seed, VOCAB_SIZE)
        plain = tokens_of(target, "vanilla", prompt)
        assert tokens_of(target, "recycling", prompt) == plain
        assert tokens_of(target, "pld", prompt) == plain


@torch.inference_mode()
def test_two_texts_at_a_time_have_rows_of_their_own() -> None:
    target = StaticTarget(known(LLAMA).build())
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
