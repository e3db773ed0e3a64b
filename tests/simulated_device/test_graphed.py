"""Passes replayed as CUDA graphs: what makes them old, what cannot be captured, what waits for the next pass."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import zip_longest
from unittest import mock

import pytest
import torch
from torch import nn

import model.backends.graphs.captured
from model.api.decoder import SpeculativeDecoder
from model.backends.graphs.graphed_target import GraphedTarget, graphed
from model.backends.passes.cache import BufferShape, LayerShape, TreeCache
from model.backends.passes.static_cache import MOST_MOVED, GraphCache, StaticStorage
from model.backends.proofs.self_test import self_test
from model.backends.target import TargetModel
from model.engine.loop import decode, generate
from model.engine.tree import DraftTree
from tests.model.decoded import known
from tests.model.engine.test_near_ties import VOCAB_SIZE, model_with_twins, tokens_of
from tests.simulated_device.demo import (
    END,
    FIRST_TEXT,
    SETTINGS,
    TEXT,
    Decoded,
    Setting,
    demo_model,
    prompt_of,
    run,
)
from tests.simulated_device.double.accounts import Accounts
from tests.simulated_device.runs import Runs

RECYCLING, PLD = Setting("recycling-averaged"), Setting("pld")
CUDA = torch.device("cuda", 0)


def decoded(target: TargetModel, setting: Setting) -> list[Decoded]:
    """Return two texts, decoded one after the other."""
    return run(target, setting, Accounts()).texts


@pytest.fixture(scope="module")
def on_cpu(runs: Runs) -> TargetModel:
    """The demo model on the CPU."""
    return runs.target_on_cpu()


@pytest.fixture(autouse=True)
def on_gpu(device_runs: Runs) -> Iterator[Runs]:
    """A GPU, simulated or real."""
    with device_runs.on_device():
        yield device_runs


def target_of(model: nn.Module) -> GraphedTarget:
    """Return the target of a model that can be captured."""
    target = graphed(model, use_kernels=False, say=pytest.fail)
    assert isinstance(target, GraphedTarget)
    return target


@pytest.fixture
def target() -> GraphedTarget:
    """The demo model, replayed."""
    return target_of(copy.deepcopy(demo_model()).to("cuda"))


def test_a_model_that_reads_from_the_device_is_launched_kernel_by_kernel(on_gpu: Runs) -> None:
    lines: list[str] = []
    model = known("PhiMoE").build().eval().to("cuda")
    target = graphed(model, use_kernels=False, say=lines.append)
    assert type(target) is TargetModel
    assert len(lines) == 1
    assert on_gpu.gpu is None or "CaptureError" in lines[0]
    self_test(target)


def test_hooks_are_called(target: GraphedTarget, on_cpu: TargetModel) -> None:
    lines: list[str] = []
    calls: list[int] = []
    expected = decoded(on_cpu, RECYCLING)
    handle = target.model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    assert type(graphed(target.model, say=lines.append)) is TargetModel
    assert "hooks" in lines[0]
    calls.clear()
    assert decoded(target, RECYCLING) == expected
    assert len(calls) >= sum(len(text.accept_lengths) for text in expected), (
        "a step left the hook out"
    )
    handle.remove()
    assert decoded(target, RECYCLING) == expected


def test_weights_at_new_addresses_are_found(target: GraphedTarget) -> None:
    host = copy.deepcopy(demo_model())
    before = [decoded(target, PLD) for _ in range(3)]
    for one in (host, target.model):
        head = one.lm_head
        head.weight = nn.Parameter(head.weight.roll(1, 0), requires_grad=False)
    expected = decoded(TargetModel(host, use_kernels=False), PLD)
    assert expected != before[0]
    assert [decoded(target, PLD) for _ in range(3)] == [expected] * 3
    num_before = target.num_prepared
    assert decoded(target, PLD) == expected
    assert target.num_prepared == num_before, "graphs of an unchanged model were forgotten"


def test_other_code_may_clear_the_memory_of_products(
    target: GraphedTarget, on_cpu: TargetModel
) -> None:
    expected = decoded(on_cpu, PLD)
    assert decoded(target, PLD) == expected
    torch._C._cuda_clearCublasWorkspaces()  # as torch does where it captures graphs of its own
    torch.cuda.empty_cache()
    num_before = target.num_prepared
    assert decoded(target, PLD) == expected
    assert target.num_prepared == num_before


@pytest.mark.parametrize(
    "setting",
    [setting for setting in SETTINGS if setting.runs_on("graphed")],
    ids=lambda setting: setting.name,
)
def test_no_measured_step_captures(
    setting: Setting, target: GraphedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.backends.graphs.captured, "SHORTEST_LENGTH", 32)
    drafter = setting.drafter(target)
    prompt, options = prompt_of(TEXT), {"max_new_tokens": 12, "eos_ids": {END}}
    generate(target, drafter, prompt[:8], **options)
    longest = 2 * len(prompt) + 12
    drafter.prepare(target, longest)
    draft_model = getattr(drafter, "_model", target)
    num_before = draft_model.num_prepared
    generate(target, drafter, 2 * prompt, **options)
    generate(target, drafter, prompt, **options)
    assert target.num_late == 0
    assert target.preparation.num_graphs > 0
    assert draft_model.num_prepared == num_before


def test_two_texts_at_a_time_do_not_share_rows(target: GraphedTarget, on_cpu: TargetModel) -> None:
    prompts = [prompt_of(TEXT), prompt_of(FIRST_TEXT)]
    options = {"max_new_tokens": 24}
    expected = [
        generate(on_cpu, RECYCLING.drafter(on_cpu), prompt, **options).token_ids
        for prompt in prompts
    ]
    for _ in range(2):  # the second time graphs are replayed
        steps = [decode(target, RECYCLING.drafter(target), prompt, **options) for prompt in prompts]
        found: list[list[int]] = [[], []]
        for pair in zip_longest(*steps):
            for text, step in zip(found, pair, strict=True):
                text += step.tokens if step else []
        assert found == expected


def test_a_conversation_goes_on_from_its_rows() -> None:
    answers = []
    for one in (demo_model(), copy.deepcopy(demo_model()).to("cuda")):
        decoder = SpeculativeDecoder(one, method="recycling-averaged")
        prompt = prompt_of(TEXT)
        first = decoder.generate(prompt, max_new_tokens=12)
        second = decoder.generate([*prompt, *first.token_ids, 5, 6], max_new_tokens=12)
        answers.append((first.token_ids, second.token_ids))
        assert len(first.token_ids) == 12
    assert answers[0] == answers[1]


def shapes() -> list[LayerShape]:
    """Return two layers of one shape."""
    part = BufferShape(num_heads=2, head_dim=3, dtype=torch.float32, device=CUDA)
    return [LayerShape(part, part)] * 2


@pytest.mark.parametrize("length", [2, MOST_MOVED, MOST_MOVED + 3])
def test_rows_move_as_in_any_cache(length: int) -> None:
    path = [0, *range(2, length + 1)]
    ours = GraphCache(StaticStorage(shapes(), 256, CUDA), 256)
    plain = TreeCache(shapes(), 256)
    rows = torch.arange(2 * 2 * 256 * 2 * 3).view(4, 256, 2, 3).float()
    ours.storage.buffers[0].copy_(rows)
    next(iter(plain.buffers.values())).copy_(rows.transpose(1, 2))
    for cache in (ours, plain):
        cache.set_length(7 + 2 * length)
        cache.keep(7, path)
        cache.keep(7, path[:1])  # moves that wait are made first
        cache.set_length(7 + length)
    found = ours.storage.buffers[0][:, : 7 + length]
    expected = next(iter(plain.buffers.values()))[:, :, : 7 + length].transpose(1, 2)
    assert torch.equal(found.cpu(), expected.cpu())


def test_logits_of_an_earlier_pass_are_read_as_they_are(target: GraphedTarget) -> None:
    cache = target.new_cache(64)
    with torch.inference_mode():
        first = target.forward(DraftTree.chain([3]), cache).clone()
        target.forward(DraftTree.chain([4, 5]), cache)
        found = target.read_out(cache, DraftTree.chain([3]), first, 2, False)
    assert found.candidates.token_ids[0] == first.topk(2).indices[0].tolist()


@pytest.mark.parametrize("seed", range(2))
def test_near_ties_are_decided_by_the_models_own_kernels(seed: int) -> None:
    twins = model_with_twins(seed, stride=2).model.to("cuda")
    target = graphed(twins, say=pytest.fail)
    assert target.norms and not target.is_reference(1), "all arithmetic is the model's own"
    generator = torch.Generator("cpu").manual_seed(seed)
    prompt = torch.randint(VOCAB_SIZE, (30,), generator=generator).tolist()
    plain = tokens_of(target, "vanilla", prompt)
    for method in ("recycling-averaged", "pld", "hybrid"):
        for _ in range(2):  # the second time graphs are replayed
            assert tokens_of(target, method, prompt) == plain, method
    assert tokens_of(target, "vanilla", prompt) == plain


def test_a_pass_that_cannot_be_captured_later_runs_as_it_is(
    target: GraphedTarget, on_cpu: TargetModel, caplog: pytest.LogCaptureFixture
) -> None:
    embed = target.model.get_input_embeddings()
    original = type(embed).forward

    def reads(self: nn.Embedding, token_ids: torch.Tensor) -> torch.Tensor:
        if len(token_ids[0]) > 4:  # larger than the drafts that were tried
            token_ids.max().item()
        found: torch.Tensor = original(self, token_ids)
        return found

    expected = decoded(on_cpu, PLD)
    with mock.patch.object(type(embed), "forward", reads):
        assert decoded(target, PLD) == expected
    assert "kernel by kernel" in caplog.text
