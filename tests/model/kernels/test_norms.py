"""Norms by torch's functions: found by their numbers, equal within rounding, the model unchanged.

Run: pytest tests/model/kernels/test_norms.py
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import model.kernels.norms as module
from model.backends.graphs.graphed_target import GraphedTarget
from model.backends.proofs.self_test import Probe, self_test, verified_logits
from model.backends.target import TargetModel
from model.engine import read_out
from model.engine.loop import generate
from model.kernels.norms import (
    FusedNorm,
    FusedNorms,
    centered,
    find_norms,
    fused_norms,
    has_fused_rms_norm,
    weighted,
    weighted_from_one,
)
from tests.model.decoded import drafter_for, known, random_ids, referee
from tests.model.families.families import TREES
from tests.model.families.test_families import PREFIX_LENGTH

LLAMA, GEMMA, COHERE = "Llama, grouped heads", "Gemma 3 text", "Cohere"
KINDS_OF = {
    LLAMA: weighted,
    "Qwen3": weighted,
    "GPT-OSS": weighted,
    "Llama 4 text": weighted,  # one kind without a weight
    "Gemma 3n text": weighted,  # with and without
    GEMMA: weighted_from_one,
    "Qwen3-Next": weighted_from_one,
    COHERE: centered,
}
# Norms that compute something else: times a gate, or with one plus a weight and a bias.
NOT_FOUND = (
    *("Qwen3NextRMSNormGated", "Qwen3_5RMSNormGated", "Qwen3_5MoeRMSNormGated"),
    *("OlmoHybridRMSNormGated", "KimiLinearRMSNormGated", "BailingHybridRMSNormGated"),
    *("NemotronLayerNorm1P", "ZayaQKNorm", "FalconMambaWeightlessRMSNorm"),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Norm(nn.Module):
    """Llama's norm.

    Args:
        size: numbers of a row.
        dtype: of its weight.
    """

    def __init__(self, size: int = 24, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size).to(dtype))
        self.some_name = 1e-6

    def forward(self, rows: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Norm the rows."""
        wide = rows.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.some_name)
        normed = self.weight * (wide * scale).to(rows.dtype)
        return normed if gate is None else normed * gate


class Squared(Norm):
    """A norm that is none for most weights, but for those that a model begins with: ones."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.ones_(self.weight)

    def forward(self, rows: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Norm the rows, times the weight twice."""
        return self.weight * super().forward(rows)


class EpsilonOutside(Norm):
    """A norm whose epsilon is added to the root."""

    def forward(self, rows: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Norm the rows."""
        return self.weight * rows / (rows.pow(2).mean(-1, keepdim=True).sqrt() + self.some_name)


class OverAll(Norm):
    """A norm over all rows together."""

    def forward(self, rows: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Norm the rows."""
        return self.weight * rows * torch.rsqrt(rows.pow(2).mean() + self.some_name)


class OtherInHalf(Norm):
    """A norm that computes something else in half precision."""

    def forward(self, rows: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Norm the rows."""
        return super().forward(rows) if rows.dtype == torch.float32 else rows


class Picky(Norm):
    """A norm that cannot be called with rows alone."""

    def forward(self, rows: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Norm the rows."""
        assert gate is not None
        return super().forward(rows, gate)


def is_norm(one: nn.Module, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a module is found to be a norm."""
    return one in find_norms(nn.ModuleList([one]), dtype, "cpu")


def fused_target(name: str, dtype: torch.dtype = torch.float32) -> TargetModel:
    """Return a target of a family whose norms have random weights, and are torch's."""
    target = TargetModel(known(name).build().to(dtype))
    norms = find_norms(target.model, dtype, "cpu")
    assert norms, "no norm was found"
    generator = torch.Generator().manual_seed(0)
    for norm in norms.values():
        if norm.weight:
            weight = getattr(norm.module, norm.weight)
            lowest = -0.5 if norm.kind is weighted_from_one else 0.5
            nn.init.uniform_(weight, lowest, lowest + 1, generator)
    target.__dict__["norms"] = FusedNorms(norms, dtype)
    return target


@pytest.mark.parametrize("name", [family.name for family in TREES])
def test_every_root_mean_square_norm_of_a_family_is_found(name: str) -> None:
    model = known(name).build()
    for dtype in DTYPES:
        found = find_norms(model.to(dtype), dtype, "cpu")
        names = {type(one).__name__ for one in model.modules() if one not in found}
        assert not {one for one in names if "RMSNorm" in one and one != "RMSNorm"} - {*NOT_FOUND}
        assert all("norm" in type(one).__name__.lower() for one in found)
        if name in KINDS_OF:
            assert {norm.kind for norm in found.values()} == {KINDS_OF[name]}


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS_OF)
def test_a_norm_computes_what_its_module_computes(name: str, dtype: torch.dtype) -> None:
    model = known(name).build().to(dtype)
    for one, norm in find_norms(model, dtype, "cpu").items():
        size = len(one.weight) if norm.weight else 16
        rows = (5 * torch.randn(1, 7, size)).to(dtype)
        expected, found = one(rows), norm(rows)
        assert found.dtype == dtype
        # Two roundings in half precision, sums in another order in float32.
        tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
        torch.testing.assert_close(found, expected, **tolerance)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [LLAMA, GEMMA, "Gemma 3n text"])
def test_half_precision_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    model = known(name).build().to(dtype)
    for one, norm in find_norms(model, dtype, "cpu").items():
        if not norm.weight:
            continue
        with torch.no_grad():
            one.weight.copy_(torch.rand(len(one.weight)) - 0.5)
        rows = torch.randn(1, 7, len(one.weight)).to(dtype)
        exact = copy.deepcopy(one).double()(rows.double())
        most = 0.51 * torch.finfo(dtype).eps * exact.abs().clamp(min=torch.finfo(dtype).tiny)
        assert bool(((norm(rows).double() - exact).abs() <= most + 1e-7).all())


def test_what_is_no_norm_stays_as_it_is() -> None:
    assert is_norm(Norm()) and is_norm(Norm(dtype=torch.bfloat16), torch.bfloat16)
    hooked, buffered, nested = Norm(), Norm(), Norm()
    hooked.__dict__["forward"] = hooked.forward
    buffered.register_buffer("scale", torch.ones(()))
    nested.part = nn.Identity()
    no_epsilon, large = Norm(), Norm()
    del no_epsilon.some_name
    large.some_name = 1.0
    wide = Norm()
    wide.weight = nn.Parameter(torch.ones(4, 24))
    others = [hooked, buffered, nested, no_epsilon, large, wide, Norm(dtype=torch.bfloat16)]
    others += [Squared(), EpsilonOutside(), OverAll(), Picky()]
    assert not any(map(is_norm, others))
    assert is_norm(OtherInHalf())
    assert not is_norm(OtherInHalf().bfloat16(), torch.bfloat16)
    # One kernel already.
    assert not is_norm(nn.RMSNorm(24, eps=1e-6)) and not is_norm(nn.LayerNorm(24, bias=False))
    assert not find_norms(nn.ModuleList([Norm()]), torch.float32, "cuda"), "it is on the CPU"


def test_finding_norms_leaves_the_model_and_the_random_numbers_alone() -> None:
    model = known(LLAMA).build()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    assert find_norms(model, torch.float32, "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all("forward" not in vars(one) for one in model.modules())


@torch.inference_mode()
@pytest.mark.parametrize("name", KINDS_OF)
def test_every_node_has_the_same_logits_within_rounding(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = fused_target(name)
    probe = Probe.random(target.vocab_size, target.chain_only, PREFIX_LENGTH)
    calls: list[str] = []
    for function in ("rms_norm", "layer_norm"):
        kind = getattr(module, function)
        monkeypatch.setattr(
            module, function, lambda *given, kind=kind: calls.append("") or kind(*given)
        )
    found = verified_logits(target, probe)
    assert len(calls) >= len(target.norms), "the passes did not go through torch's functions"
    calls.clear()
    with target.reference():
        expected = verified_logits(target, probe)
    assert not calls
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", [LLAMA, GEMMA])
@pytest.mark.parametrize("method", ["vanilla", "recycling", "pld"])
def test_tokens_equal_generate(name: str, method: str) -> None:
    target = fused_target(name)
    assert not target.is_reference(1) and not target.is_reference(28)
    self_test(target)
    prompt = random_ids(28)
    answer = generate(target, drafter_for(method, target), prompt, max_new_tokens=40)
    assert answer.token_ids == referee(target, prompt, 40)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [LLAMA, "Granite", "Qwen2", GEMMA])
def test_half_precision_is_proved_with_the_norms_of_plain_decoding(
    name: str, dtype: torch.dtype
) -> None:
    target = fused_target(name, dtype)
    self_test(target)
    assert not target.chain_only and target.norms


def test_near_ties_are_decided_with_the_models_own_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(rows: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
        return 1.5 * weighted(rows, weight, epsilon).flip(-1)

    target = TargetModel(known(LLAMA).build())
    found = find_norms(target.model, torch.float32, "cpu")
    norms = {one: FusedNorm(one, wrong, norm.weight, norm.epsilon) for one, norm in found.items()}
    target.__dict__["norms"] = FusedNorms(norms, torch.float32)
    prompt = random_ids(28)
    expected = referee(target, prompt, 40)
    answer = generate(target, drafter_for("recycling", target), prompt, max_new_tokens=40)
    assert answer.token_ids != expected
    monkeypatch.setattr(read_out, "TIE_STEPS", 1e9)
    answer = generate(target, drafter_for("recycling", target), prompt, max_new_tokens=40)
    assert answer.token_ids == expected


def test_half_precision_is_plain_with_torchs_functions() -> None:
    found = {one: FusedNorm(one, weighted, "weight", "some_name") for one in (Norm(),)}
    assert FusedNorms(found, torch.bfloat16).is_plain
    assert not FusedNorms(found, torch.float32).is_plain
    assert FusedNorms({}, torch.float32).is_plain


def test_what_a_function_cannot_do_the_module_does() -> None:
    norm = Norm()
    fused = FusedNorm(norm, lambda *given: pytest.fail("not what was asked for"), "weight", "")
    rows, gate = torch.randn(2, 24), torch.rand(2, 24)
    with torch.inference_mode():
        for arguments, options in (((rows, gate), {}), ((rows,), {"gate": gate}), ((), {})):
            given: Any = {"rows": rows, **options} if not arguments else options
            assert torch.equal(fused(*arguments, **given), norm(*arguments, **given))
        assert torch.equal(fused(rows.double()), norm(rows.double()))
    assert fused(rows).requires_grad, "a gradient was lost"


@torch.inference_mode()
def test_changed_weights_and_copies_count_at_once() -> None:
    target = fused_target(LLAMA)
    probe = Probe.random(target.vocab_size, False, PREFIX_LENGTH)
    before = verified_logits(target, probe)
    copied = copy.deepcopy(target)
    for one in target.norms._norms:
        one.weight.mul_(2)
    torch.testing.assert_close(verified_logits(copied, probe), before)
    after = verified_logits(target, probe)
    with target.reference():
        torch.testing.assert_close(after, verified_logits(target, probe), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(after, before, rtol=0.1)


def test_a_norm_is_itself_again_after_an_error() -> None:
    norm = Norm()
    norms = FusedNorms(find_norms(nn.ModuleList([norm]), torch.float32, "cpu"), torch.float32)
    with pytest.raises(RuntimeError, match="stop"), norms.of_pass().patched():
        assert "forward" in vars(norm)
        raise RuntimeError("stop")
    assert "forward" not in vars(norm)


def test_norms_are_exchanged_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_fused_rms_norm", lambda: True)
    assert not TargetModel(known(LLAMA).build()).norms
    asked: list[str] = []
    monkeypatch.setattr(
        module, "find_norms", lambda model, dtype, device: asked.append(device) or {}
    )
    model = known(LLAMA).build()
    assert not TargetModel(model, use_kernels=False).norms
    monkeypatch.setattr(module, "has_fused_rms_norm", lambda: False)
    fused_norms(model, torch.float32)
    assert asked == []
    monkeypatch.setattr(module, "has_fused_rms_norm", lambda: True)
    assert not GraphedTarget(model).norms
    assert asked == ["cuda"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_torch_has_its_norm_as_one_kernel() -> None:
    assert has_fused_rms_norm()
