"""A vLLM that the drafter does not fit is refused with its version."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from token_recycling_vllm import seams


def test_a_missing_function_and_a_missing_parameter_are_named(monkeypatch):
    module = ModuleType("engine_x")
    module.Runner = type("Runner", (), {"propose": lambda self, tokens: None})
    monkeypatch.setitem(sys.modules, "engine_x", module)
    assert seams.missing((("engine_x", "Runner.propose", ("tokens",)),)) == []
    assert seams.missing((("engine_x", "Runner.propose", ("rows",)),)) == [
        "engine_x.Runner.propose: has no parameter rows"
    ]
    assert "Draft" in seams.missing((("engine_x", "Draft", ()),))[0]
    assert "engine_y" in seams.missing((("engine_y", "Draft", ()),))[0]


def test_the_refusal_names_the_version(monkeypatch):
    monkeypatch.setattr(seams, "installed_version", lambda: "9.9.9")
    monkeypatch.setattr(seams, "missing", lambda hooks: ["a.b: has no parameter c"])
    with pytest.raises(
        RuntimeError, match=r"does not fit vLLM 9\.9\.9 .*: a\.b: has no parameter c"
    ):
        seams.check_vllm()


def test_other_arguments_are_refused(monkeypatch):
    lengths, texts = np.zeros(1, np.int32), np.zeros((1, 4), np.int32)
    seams.check_arguments([[1]], lengths, texts)
    with pytest.raises(RuntimeError, match="propose got int, list, ndarray"):
        seams.check_arguments(5, [[1]], lengths)


def test_sampled_requests_are_refused_on_a_cpu(monkeypatch):
    class SamplingParams:
        def __init__(self, temperature: float) -> None:
            self.temperature = temperature
            self.validated = 0

        def _validate_spec_decode(self, speculative_config) -> None:
            self.validated += 1

    modules = {
        "vllm": ModuleType("vllm"),
        "vllm.platforms": SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: True)),
        "vllm.exceptions": SimpleNamespace(VLLMValidationError=ValueError),
        "vllm.sampling_params": SimpleNamespace(SamplingParams=SamplingParams),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert not seams.is_registered()
    seams.register()
    seams.register()
    assert seams.is_registered()
    ours = SimpleNamespace(model="token_recycling_vllm.RecyclingProposer")
    with pytest.raises(ValueError, match=r"temperature: got 0\.8; allowed: 0"):
        SamplingParams(0.8)._validate_spec_decode(ours)
    for params, config in ((SamplingParams(0.0), ours), (SamplingParams(0.8), None)):
        params._validate_spec_decode(config)
        assert params.validated == 1
