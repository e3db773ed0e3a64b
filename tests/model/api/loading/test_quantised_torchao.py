"""Models that torchao quantised: our kernel reads their whole numbers, and tokens are the dequantised model's.

torchao is no requirement of the tests: where it is installed, every process imports it and writes to stderr. So:
pip install --target .venv/torchao --no-deps "torchao>=0.18,<0.19"

Run: PYTHONPATH=.venv/torchao pytest tests/model/api/loading/test_quantised_torchao.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

from model import SpeculativeDecoder
from model.api.loading import weights
from model.api.loading.weights import choose_weights, quantised_as, read_weights
from model.backends.target import TargetModel
from model.kernels.linear import QuantisedLinear
from model.kernels.short_pass import short_pass_kernel
from tests.model.decoded import referee

quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")

DEMO = "data/demo/model"
PROMPT = "USER: Write about rain. ASSISTANT:"
INT8 = quantization.Int8WeightOnlyConfig()
INT4 = quantization.IntxWeightOnlyConfig(
    weight_dtype=torch.int4, granularity=quantization.PerGroup(32)
)
WITH_INPUTS = quantization.Int8DynamicActivationInt8WeightConfig()


@pytest.fixture(scope="module", autouse=True)
def _kernel() -> None:
    if not short_pass_kernel():
        pytest.skip("the kernels cannot be built here")


def quantised(config: Any, dtype: torch.dtype = torch.float32, path: Any = DEMO) -> Any:
    """Return the demo model as torchao quantises it."""
    words = {"quantization_config": TorchAoConfig(config)} if config else {}
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **words).eval()


def linears(model: Any) -> list[str]:
    """The names of the layers that are quantised."""
    return [
        name for name, one in model.named_modules() if hasattr(getattr(one, "weight", 0), "qdata")
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [INT8, INT4])
def test_whole_numbers_stay_as_they_are(config: Any, dtype: torch.dtype) -> None:
    original = quantised(config, dtype)
    names = linears(original)
    words = {"quantization_config": TorchAoConfig(config), "dtype": dtype}
    packed = read_weights(DEMO, "native", **words)
    plain = read_weights(DEMO, "dequantised", **words)
    assert names and not linears(packed) and not linears(plain)
    for name in names:
        layer, expected = (
            packed.get_submodule(name),
            original.get_submodule(name).weight.dequantize(),
        )
        assert (
            type(layer) is QuantisedLinear and layer.blocks.nbytes * 32 == layer.weight.numel() * 36
        )
        assert torch.equal(layer.weight, expected)
        assert torch.equal(plain.get_submodule(name).weight, expected)
    assert not hasattr(packed.config, "quantization_config")


@pytest.mark.parametrize("method", ["vanilla", "recycling", "hybrid"])
def test_a_saved_model_gives_the_tokens_of_its_dequantised_weights(
    method: str, tmp_path: Path
) -> None:
    quantised(INT8).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(tmp_path)
    decoder = SpeculativeDecoder.from_pretrained(tmp_path, method, torch.float32)
    assert "packed-36" in decoder.target.linear_kernels.name
    plain = read_weights(tmp_path, "dequantised", dtype=torch.float32).eval()
    prompt_ids = decoder.tokenizer(PROMPT).input_ids
    expected = referee(TargetModel(plain), prompt_ids, 32, eos_id=decoder.tokenizer.eos_token_id)
    assert decoder.generate(PROMPT, max_new_tokens=32).token_ids == expected


def test_a_model_that_is_quantised_as_it_loads_is_read_so_too() -> None:
    words = {"quantization_config": TorchAoConfig(INT8)}
    decoder = SpeculativeDecoder.from_pretrained(DEMO, "vanilla", torch.float32, **words)
    assert "packed-36" in decoder.target.linear_kernels.name


def test_auto_is_native_only_for_whole_numbers_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"quantization_config": TorchAoConfig(INT8).to_dict()}
    others = {"quantization_config": TorchAoConfig(WITH_INPUTS).to_dict()}
    assert quantised_as(config) == "Int8WeightOnlyConfig"
    assert choose_weights(DEMO, "auto", "cpu", torch.float32, config) == "native"
    assert choose_weights(DEMO, "dequantised", "cpu", torch.float32, config) == "dequantised"
    assert choose_weights(DEMO, "auto", "meta", torch.float32, config) is None
    assert choose_weights(DEMO, "auto", "cpu", torch.float32, others) is None
    with pytest.raises(
        ValueError, match=r"quantised with Int8Dynamic.*; allowed: with one of Int8W"
    ):
        choose_weights(DEMO, "native", "cpu", torch.float32, others)
    monkeypatch.setattr(weights, "short_pass_kernel", lambda: None)
    assert choose_weights(DEMO, "auto", "cpu", torch.float32, config) is None


def test_layers_whose_inputs_are_quantised_stay_torchaos() -> None:
    model = read_weights(
        DEMO, "native", dtype=torch.float32, quantization_config=TorchAoConfig(WITH_INPUTS)
    )
    assert linears(model) and not any(type(one) is QuantisedLinear for one in model.modules())
    assert hasattr(model.config, "quantization_config")
