"""The self-test passes right models and notices every kind of bug that it is meant for.

Run: pytest tests/model/backends/proofs/test_self_test.py
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MethodType

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.utils import ModelOutput

from model import SpeculativeDecoder
from model.backends.passes import loaded_model
from model.backends.passes.cache import TreeCache
from model.backends.passes.masks import TreeMasks
from model.backends.proofs import self_test as module
from model.backends.proofs.plain_decoding import PlainDecoding
from model.backends.proofs.self_test import (
    CHAIN,
    TREE,
    LogitComparison,
    Probe,
    compare,
    expected_logits,
    plain_logits,
    prove,
    self_test,
)
from model.backends.proofs.support import UnsupportedModelError
from model.backends.target import TargetModel
from model.engine.loop import generate
from model.engine.tree import TreeTopology
from model.kernels.norms import FusedNorms, find_norms
from tests.hang import HANG
from tests.model.decoded import drafter_for, random_ids, referee
from tests.model.families.family import Family

FLOOR = 1e-2  # in logits; bugs make larger errors, rounding in float32 far smaller ones


def fresh(config: str = "LlamaConfig", **options: object) -> TargetModel:
    """Return an unchecked target, with a window longer than the self-test's text where it has one."""
    return TargetModel(Family("a model under test", config, options).build())


def test_a_right_model_passes_with_rounding_errors_only() -> None:
    target = fresh()
    assert self_test(target) < 1e-4
    assert not target.chain_only


def test_the_probe_tree_branches_and_its_path_skips_rows() -> None:
    probe = Probe.random(50, is_chain=False)
    assert probe.topology.num_nodes == 13 and not probe.topology.is_chain
    assert list(probe.path) == probe.topology.path_to(probe.path[-1])
    assert probe.path != tuple(range(len(probe.path)))
    assert Probe.random(50, is_chain=False) == probe, "the same probe for the same arguments"


def test_one_wrong_mask_entry_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_key_too_many(topology: TreeTopology, *args: object) -> torch.Tensor:
        mask = original(topology, *args).clone()
        if not topology.is_chain:
            mask[5, 4] = 0  # node 5 sees its sibling
        return mask

    original = TreeTopology.additive_mask
    monkeypatch.setattr(TreeTopology, "additive_mask", one_key_too_many)
    assert_trees_are_given_up(fresh())


def test_one_wrong_position_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_too_deep(topology: TreeTopology, *args: object) -> torch.Tensor:
        depths = original(topology, *args).clone()
        depths[-1] += 1
        return depths

    original = TreeTopology.depth_tensor
    monkeypatch.setattr(TreeTopology, "depth_tensor", one_too_deep)
    assert_trees_are_given_up(fresh())


def test_a_wrong_kept_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_a_sibling(cache: TreeCache, base: int, rows: Sequence[int]) -> None:
        is_tree = cache.length - base == TREE.num_nodes
        original(cache, base, [8 if is_tree and row == 7 else row for row in rows])

    original = TreeCache.keep
    monkeypatch.setattr(TreeCache, "keep", keep_a_sibling)
    assert_trees_are_given_up(fresh())


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("MistralConfig", {"sliding_window": 200}),
        (
            "Gemma2Config",
            {"sliding_window": 200, "layer_types": ["sliding_attention", "full_attention"]},
        ),
    ],
)
def test_a_mask_without_the_window_is_noticed_by_a_text_shorter_than_the_window(
    config: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = fresh(config, **options)
    monkeypatch.setattr(TreeMasks, "_limit", lambda _, mask, *__: mask)
    assert_trees_are_given_up(target)


def test_a_failing_chain_refuses_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_one_less(cache: TreeCache, base: int, rows: Sequence[int]) -> None:
        original(cache, base, rows[:-1])

    original = TreeCache.keep
    monkeypatch.setattr(TreeCache, "keep", keep_one_less)
    with pytest.raises(UnsupportedModelError, match="chain is not lossless") as error:
        self_test(fresh())
    assert "\n" not in str(error.value)


def test_a_model_that_raises_on_a_mask_verifies_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_mask(*_: object) -> torch.Tensor:
        raise RuntimeError("no such mask\nand a second line")

    target = fresh()
    monkeypatch.setattr(target.masks, "of_tree", no_mask)
    assert_trees_are_given_up(target, "RuntimeError: no such mask")
    assert "\n" not in target.chain_reason


def test_not_a_number_is_not_exact() -> None:
    assert not LogitComparison(float("nan"), 1.0).is_exact


def test_half_precision_is_measured_against_its_own_loop() -> None:
    target = TargetModel(Family("half", "LlamaConfig").build().to(torch.bfloat16))
    probe = Probe.random(target.vocab_size, is_chain=False)
    with torch.inference_mode():
        comparison = compare(target, probe)
    assert comparison.is_exact, str(comparison)
    assert comparison.allowed > FLOOR, "rounding to 8 bits shows in the logits"


def test_half_precision_allows_some_roundings_where_the_loop_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PlainDecoding, "noise", lambda *_: 0.0)
    for dtype in (torch.bfloat16, torch.float16):
        target = TargetModel(Family("half", "LlamaConfig").build().to(dtype))
        probe = Probe.random(target.vocab_size, is_chain=True)
        with torch.inference_mode():
            spread = float(expected_logits(target, probe).std())
            assert 0 < compare(target, probe).allowed < 0.2 * spread


class Elsewhere(torch.Tensor):
    """Logits on another device: they can be cut and brought here, and computed with nowhere."""

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> torch.Tensor:
        name = getattr(function, "__name__", "")
        assert name in ("__getitem__", "to"), f"{name} of a tensor on another device"
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return result.as_subclass(torch.Tensor if name == "to" else cls)


def test_logits_that_a_model_leaves_on_its_last_device_are_brought_to_the_targets() -> None:
    target = fresh()
    expected = plain_logits(target, random_ids(5), 2)

    def leave(_: object, __: object, output: ModelOutput) -> ModelOutput:
        output.logits = output.logits.as_subclass(Elsewhere)
        return output

    target.model.register_forward_hook(leave)
    assert type(target.model(torch.tensor([[1]])).logits) is Elsewhere
    torch.testing.assert_close(plain_logits(target, random_ids(5), 2), expected)
    assert self_test(target) < 1e-4
    assert not target.chain_only


def test_windows_over_key_indices_are_declared_however_wide() -> None:
    """The self-test's text is shorter than the window, which the model itself makes."""
    layers = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    target = fresh("GPTNeoConfig", **layers, window_size=64)
    self_test(target)
    assert "windows of its local layers" in target.chain_reason
    prompt = random_ids(30)
    answer = generate(target, drafter_for("recycling", target), prompt, max_new_tokens=120)
    assert answer.token_ids == referee(target, prompt, 120)


@pytest.mark.parametrize("context", [8, 12, 17, 18, 23])
def test_a_short_context_is_tested_with_a_short_text(context: int) -> None:
    target = fresh("GPT2Config", n_embd=32, n_layer=2, n_head=4, max_position_embeddings=context)
    assert self_test(target) < 1e-4
    assert not target.chain_only
    with pytest.raises(UnsupportedModelError, match="has a context of 7 tokens; allowed: 8 or"):
        self_test(fresh("GPT2Config", n_embd=32, n_head=4, max_position_embeddings=7))


def assert_trees_are_given_up(target: TargetModel, reason: str = "tree is not lossless") -> None:
    """Check that the self-test falls back to chains with a warning, and that the chain is right."""
    error = self_test(target)
    assert target.chain_only, "the bug went unnoticed"
    assert reason in target.chain_reason
    assert error < 1e-4, "the error returned is the chain's"
    assert compare(target, Probe.random(target.vocab_size, is_chain=True)).is_exact


def test_giving_up_trees_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = fresh()
    monkeypatch.setattr(target.masks, "of_tree", lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING):
        self_test(target)
    assert "chain drafts only" in caplog.text
    assert CHAIN.is_chain


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[Probe]:
    """The probes compared since the test began."""
    found: list[Probe] = []

    def counted(target: TargetModel, probe: Probe) -> LogitComparison:
        found.append(probe)
        return original(target, probe)

    original = module.compare
    monkeypatch.setattr(module, "compare", counted)
    return found


def test_a_model_is_tested_by_its_first_decoder_only(comparisons: list[Probe]) -> None:
    model = fresh().model
    for method in ("recycling", "pld", "recycling"):
        assert SpeculativeDecoder(model, method=method).generate([1, 2], max_new_tokens=2).token_ids
        assert len(comparisons) == 2, "a chain and a tree, once"
    SpeculativeDecoder(fresh().model)
    assert len(comparisons) == 4, "another model"


def _write(model: LlamaForCausalLM) -> None:
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1


def _write_data(model: LlamaForCausalLM) -> None:
    model.lm_head.weight.data[0, 0] += 1


def _replace_layer(model: LlamaForCausalLM) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()


def _patch_forward(model: LlamaForCausalLM) -> None:
    model.forward = MethodType(LlamaForCausalLM.forward, model)


@pytest.mark.parametrize(
    "change",
    [
        _write,
        _write_data,
        _replace_layer,
        _patch_forward,
        lambda model: model.set_attn_implementation("eager"),
        lambda model: model.register_forward_hook(lambda *_: None),
        lambda model: model.to(torch.bfloat16),
        lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
    ],
)
def test_a_changed_model_is_tested_again(
    change: Callable[[LlamaForCausalLM], object], comparisons: list[Probe]
) -> None:
    model = fresh().model
    prove(TargetModel(model))
    change(model)
    prove(TargetModel(model))
    assert len(comparisons) == 4
    prove(TargetModel(model, use_kernels=False))
    assert len(comparisons) == 6, "other kernels"


def test_the_code_of_a_class_that_was_changed_is_tested(
    comparisons: list[Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = fresh()
    kind = type(target.model.model.layers[0].mlp)
    prove(target)
    monkeypatch.setattr(kind, "forward", lambda mlp, hidden: mlp.down_proj(mlp.up_proj(hidden)))
    target.check_model()
    assert len(comparisons) == 4


def test_a_model_with_hooks_is_tested_every_time(comparisons: list[Probe]) -> None:
    target = fresh()
    target.model.register_forward_hook(lambda *_: None)
    for number in (1, 2):
        prove(target)
        assert len(comparisons) == 2 * number


def test_what_a_patched_forward_passed_says_nothing_of_the_models_own(
    comparisons: list[Probe],
) -> None:
    target = fresh()
    _patch_forward(target.model)
    prove(target)
    del target.model.forward
    prove(target)
    assert len(comparisons) == 4


def test_a_second_decoder_of_a_model_without_trees_drafts_chains_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = fresh()
    monkeypatch.setattr(first.masks, "of_tree", lambda *_: 1 / 0)
    prove(first)
    caplog.clear()
    second = SpeculativeDecoder(first.model).target
    assert second.chain_only and second.chain_reason == first.chain_reason
    assert "chain drafts only" in caplog.text


def wrong_norms(model: PreTrainedModel, dtype: torch.dtype) -> FusedNorms:
    """Return norms that are far off."""
    found = find_norms(model, dtype, "cpu")

    def wrong(rows: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
        return rows.flip(-1)

    return FusedNorms({one: replace(norm, kind=wrong) for one, norm in found.items()}, dtype)


def test_kernels_with_which_drafts_are_not_lossless_are_turned_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loaded_model, "fused_norms", wrong_norms)
    target = fresh()
    assert target.has_kernels
    assert prove(target) < 1e-4
    assert not target.has_kernels and not target.use_kernels and not target.chain_only
    assert (
        caplog.text.count("kernels are off, since a draft fails with them: its logits differ") == 1
    )
    second = TargetModel(target.model)
    prove(second)
    assert not second.has_kernels, "the verdict was kept without this"
    prompt = random_ids(20)
    answer = generate(second, drafter_for("recycling", second), prompt, max_new_tokens=20)
    assert answer.token_ids == referee(second, prompt, 20)


def test_kernels_stay_where_drafts_fail_without_them_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def right_norms(model: PreTrainedModel, dtype: torch.dtype) -> FusedNorms:
        return FusedNorms(find_norms(model, dtype, "cpu"), dtype)

    monkeypatch.setattr(loaded_model, "fused_norms", right_norms)
    target = fresh()
    monkeypatch.setattr(target.masks, "of_tree", lambda *_: 1 / 0)
    prove(target)
    assert target.chain_only and target.has_kernels
    assert "kernels are off" not in caplog.text


def test_a_slow_self_test_says_so_and_a_fast_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: object) -> LogitComparison:
        assert is_said.wait(timeout=HANG), "nothing was said"
        return original(*arguments)

    def say(text: str) -> None:
        said.append(text)
        is_said.set()

    original = module.compare
    monkeypatch.setattr(module, "SLOW_SECONDS", 3600.0)
    said: list[str] = []
    is_said = threading.Event()
    self_test(fresh(), say=say)
    assert not said
    monkeypatch.setattr(module, "SLOW_SECONDS", 0.01)
    monkeypatch.setattr(module, "compare", slow)
    self_test(fresh(), say=say)
    assert said == [
        "model type llama: comparing drafts with plain forward passes, once a model; slow on a busy machine"
    ]
