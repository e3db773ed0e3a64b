"""Decoder layers as programs: which layers have one, what they compute, and when the layers themselves run.

Run: pytest tests/model/backends/programs/test_layers.py
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from model.backends.programs import layers as module
from model.backends.programs import program
from model.backends.programs.program import with_cache
from model.backends.proofs.self_test import self_test
from model.backends.target import TargetModel
from model.engine.loop import generate
from model.engine.tree import DraftTree
from model.kernels import attention, linear
from model.kernels.short_pass import short_pass_kernel
from tests.model.decoded import drafter_for, known, random_ids, referee
from tests.model.families.test_families import batch_tokens

LLAMA = "Llama, grouped heads"
# Norms before and after, one and two inputs of a norm, partial and paired rotation, biases, a window, a matrix
# for queries, keys and values together, and layers in parallel.
PROGRAMMED = (
    *(
        LLAMA,
        "Qwen3",
        "Gemma 3 text",
        "Phi",
        "Phi 3, sliding window",
        "GPT-NeoX",
        "Cohere 2",
        "GLM-4",
    ),
    *("OLMo 2", "StarCoder 2", "OPT", "Ministral 3"),
)


@pytest.fixture(autouse=True)
def _kernels_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    if not short_pass_kernel():
        pytest.skip("the kernels cannot be built here")
    for one in (linear, attention):
        monkeypatch.setattr(one, "FEWEST_WEIGHTS", 0)


def target_of(name: str) -> TargetModel:
    family = known(name)
    if not family.is_known:
        pytest.skip("not in this version of transformers")
    return TargetModel(family.build())


@pytest.mark.parametrize("name", PROGRAMMED)
def test_layers_run_as_programs_and_texts_stay_transformers(name: str) -> None:
    target = target_of(name)
    num_layers = target.config.num_hidden_layers
    assert target.kernel_names["layers"] == f"programs-{num_layers}"
    assert self_test(target) < 1e-3 and target.programs, "programs were found wrong"
    prompt = random_ids(20)
    expected = referee(target, prompt, 24)
    drafter = drafter_for("hybrid", target)
    assert generate(target, drafter, prompt, max_new_tokens=24).token_ids == expected


def logits_of(target: TargetModel, num_rows: int) -> torch.Tensor:
    """Return the logits of the last of some rows that each see themselves and the text before."""
    cache = target.new_cache(60)
    prompt = random_ids(9)
    for _ in target.prefill(prompt, cache, with_logits=False):
        pass
    tree = DraftTree.star([5] * (num_rows - 1) + [7])
    return target.forward(tree, cache)[-1].clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_beside_any_other_rows(dtype: torch.dtype) -> None:
    target = TargetModel(known(LLAMA).build().to(dtype))
    assert target.programs
    with torch.inference_mode():
        few, many = (logits_of(target, num_rows) for num_rows in (3, 40))
    assert torch.equal(few, many)


@pytest.mark.parametrize("name", [LLAMA, "Gemma 3 text"])
def test_texts_that_share_passes_stay_transformers(name: str) -> None:
    target = target_of(name)
    assert self_test(target) < 1e-3 and target.programs
    prompts = [(random_ids(length, seed=length), 40) for length in (5, 21, 12)]
    assert batch_tokens(target, prompts) == [referee(target, *one) for one in prompts]


@torch.inference_mode()
def test_in_float32_plain_decoding_is_still_the_reference() -> None:
    target = target_of(LLAMA)
    ids = torch.tensor(random_ids(6))
    plain = target.model(ids[None]).logits[0]
    with target.reference():
        assert not target.programs.are_used(1, in_reference=True)
        assert torch.equal(target.read(ids, 0, target.new_cache(8), False), plain)
    assert target.programs.are_used(1)


@torch.inference_mode()
def test_other_weights_and_hooks_are_heeded() -> None:
    target = target_of(LLAMA)
    layer = target.model.model.layers[1].mlp
    ids = torch.tensor(random_ids(6))

    def passes() -> tuple[torch.Tensor, torch.Tensor]:
        return target.read(ids, 0, target.new_cache(8), False).clone(), target.model(
            ids[None]
        ).logits[0]

    assert target.programs
    layer.up_proj.weight = nn.Parameter(layer.up_proj.weight * 2)
    torch.testing.assert_close(*passes())
    layer.register_forward_hook(lambda module, given, output: output * 3)
    assert target.programs and not target.programs.are_used(1)
    torch.testing.assert_close(*passes())
    target.check_model()
    assert not target.programs, "programs go past the hook"
    torch.testing.assert_close(*passes())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("OLMoE", "depends on the numbers it reads"),
        ("DeepSeek-V3", "attends to other keys"),
        ("GPT-2", "given more than its rows"),
    ],
)
def test_layers_without_a_program_run_as_they_are_with_a_line(
    name: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = target_of(name)
    with caplog.at_level(logging.INFO, logger=module.logger.name):
        assert target.kernel_names["layers"] == "as-they-are"
    assert reason in caplog.text and "0 of 2 layers run as programs" in caplog.text


def test_threads_capture_models_of_their_own_at_once() -> None:
    call, targets = nn.Module.__call__, [target_of(LLAMA) for _ in range(4)]
    with ThreadPoolExecutor(len(targets)) as threads:
        names = [*threads.map(lambda target: target.kernel_names["layers"], targets)]
    assert names == ["programs-2"] * len(targets)
    assert nn.Module.__call__ is call, "a capture has left its own call of modules"


def test_a_program_that_differs_from_its_layer_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.silu.default):
            node.target = torch.ops.aten.relu.default

    monkeypatch.setattr(module, "rewrite", wrong)
    target = target_of(LLAMA)
    with caplog.at_level(logging.INFO, logger=module.logger.name):
        assert not target.programs
    assert "a program that differs from its layer by" in caplog.text


def test_attention_that_differs_in_one_call_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        program, "with_cache", lambda graph, scale: with_cache(graph, scale=2 * scale)
    )
    assert not target_of(LLAMA).programs


@torch.inference_mode()
def test_a_draft_is_one_call_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, is_one_call = module.ProgrammedLayer.at_once, list[bool]()

    def watched(*arguments: object) -> torch.Tensor | None:
        found = at_once(*arguments)
        is_one_call.append(found is not None)
        return found

    target = target_of(LLAMA)
    assert target.programs
    monkeypatch.setattr(module.ProgrammedLayer, "at_once", watched)
    for num_rows in (1, 7):
        logits_of(target, num_rows)
        assert all(is_one_call[-2:])  # of the draft, in two layers; prompts attend without a mask


def test_layers_of_other_code_have_no_program() -> None:
    class Other(nn.SiLU):
        pass

    target = target_of(LLAMA)
    target.model.model.layers[0].mlp.act_fn = Other()
    assert target.kernel_names["layers"] == "programs-1"
