"""Models that other packages have changed: adapters, quantised weights, compiled, spread over devices.

Run: pytest tests/model/backends/proofs/test_wrapped_models.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from model import SpeculativeDecoder
from model.api.accelerate import speculative
from model.methods import METHODS
from tests.model.decoded import known, random_ids, required_options

LLAMA = "Llama, grouped heads"
PROMPT = random_ids(14, seed=1)
NUM_TOKENS = 20


def plain(model: Any) -> list[int]:
    """Return the new tokens of `generate`."""
    ids = torch.tensor([PROMPT])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NUM_TOKENS}
    return model.generate(input_ids=ids, **options, do_sample=False)[0, len(PROMPT) :].tolist()


def decoder_for(method: str, model: Any) -> SpeculativeDecoder:
    """Return a method on a model."""
    return SpeculativeDecoder(model, None, method, **required_options(method, model.config))


def decoded(decoder: SpeculativeDecoder) -> list[int]:
    """Return the new tokens of a method."""
    return decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS).token_ids


@pytest.mark.parametrize("method", METHODS)
def test_adapters_count_and_may_be_switched_between_answers(method: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    rescale_adapter_scale = pytest.importorskip("peft.helpers").rescale_adapter_scale
    base = plain(known(LLAMA).build())
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(known(LLAMA).build(), config).eval()
    adapted = plain(model)
    assert adapted != base
    decoder = decoder_for(method, model)
    assert decoded(decoder) == adapted
    with model.disable_adapter():
        assert decoded(decoder) == base, "rows of the adapted model should not be kept"
    with rescale_adapter_scale(model, 0.3):
        rescaled = plain(model)
        assert decoded(decoder) == rescaled != adapted
    assert decoded(decoder) == adapted
    ids = torch.tensor([PROMPT])
    decode = speculative(method, **required_options(method, model.config))
    found = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        custom_generate=decode,
    )
    assert found[0].tolist() == PROMPT + adapted


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_a_learned_prompt_is_refused(kind: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(known(LLAMA).build(), config).eval()
    with pytest.raises(ValueError, match="model: got a learned prompt; allowed: adapters"):
        SpeculativeDecoder(model)
    ids = torch.tensor([PROMPT])
    with pytest.raises(ValueError, match="model: its prepare_inputs_for_generation was replaced"):
        model.generate(input_ids=ids, max_new_tokens=4, custom_generate=speculative("pld"))
    base = model.get_base_model()
    options = {"max_new_tokens": 4, "attention_mask": torch.ones_like(ids), "do_sample": False}
    found = base.generate(ids, **options, custom_generate=speculative("pld"))
    assert torch.equal(found, base.generate(ids, **options))


@pytest.mark.parametrize("method", METHODS)
def test_quantised_weights_decode_as_plainly(method: str) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = known(LLAMA).build()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    weight = model.model.layers[0].mlp.up_proj.weight
    assert type(weight) is not torch.nn.Parameter, "nothing was quantised"
    assert decoded(decoder_for(method, model)) == plain(model)


def test_a_compiled_model_is_taken_as_it_is() -> None:
    model = known(LLAMA).build()
    expected = plain(model)
    compiled: Any = torch.compile(model)
    with torch.compiler.set_stance("force_eager"):  # compilation itself is not tested here
        decoder = decoder_for("recycling", compiled)
        assert decoded(decoder) == expected
    assert decoder.target.model is compiled, "the compiled model should be what runs"


def test_a_device_map_is_followed(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = known(LLAMA).build()
    expected = plain(model)
    model.save_pretrained(tmp_path)
    # A second device that every machine has: weights on the disk come when their layer runs.
    placement = {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }

    spread = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        device_map=placement,
        offload_folder=str(tmp_path / "offload"),
    ).eval()
    assert spread.hf_device_map["model.layers.1"] == "disk"
    for method in METHODS:
        assert decoded(decoder_for(method, spread)) == expected
