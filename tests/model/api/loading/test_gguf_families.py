"""GGUF files of eight families: the texts of the models that they were made of, and keys that are read or refused.

Run: pytest tests/model/api/loading/test_gguf_families.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from model import SpeculativeDecoder
from model.api.loading import weights
from model.api.loading.weights import read, read_weights
from model.kernels.linear import QuantisedEmbedding, QuantisedLinear
from model.kernels.short_pass import short_pass_kernel
from tests.model.api.loading.gguf_families import (
    CONTEXT,
    FAMILIES,
    HEADS,
    HIDDEN,
    ORIGINAL,
    WINDOW,
    Family,
    family_model,
    llama3,
    write_family,
    write_keys,
)

pytestmark = pytest.mark.skipif(
    not hasattr(weights.transformers, "GgufConfig"),
    reason="GGUF files need transformers 5.23 or newer",
)
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0")
NATIVE = ("Q8_0", "Q4_0")
NEW = 24
FULL, SLIDING = "full_attention", "sliding_attention"


def prompt_ids(length: int = ORIGINAL + 26) -> list[int]:
    """A prompt, longer than the context that scaled embeddings were first trained on."""
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def texts(model: Any, file: Path, method: str) -> tuple[list[int], list[int]]:
    """Return the tokens of transformers' `generate` for a model, and a decoder's for its file."""
    ids = prompt_ids()
    words = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(torch.tensor([ids]), **words)[0, len(ids) :].tolist()
    decoder = SpeculativeDecoder.from_pretrained(file, method, torch.float32)
    return expected, decoder.generate(ids, max_new_tokens=NEW).token_ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_texts_are_those_of_the_model(name: str, kind: str, tmp_path: Path) -> None:
    model = family_model(FAMILIES[name])
    file = write_family(tmp_path / "tiny.gguf", FAMILIES[name], model, kind)
    expected, found = texts(model, file, "hybrid" if kind == "F32" else "vanilla")
    assert found == expected and len(set(expected)) > 2
    read_model = read_weights(file, "dequantised", dtype=torch.float32).eval()
    ids = torch.tensor([prompt_ids(CONTEXT // 2)])
    with torch.no_grad():
        torch.testing.assert_close(read_model(ids).logits, model(ids).logits)
        if kind in NATIVE and short_pass_kernel():
            native = read_weights(file, "native", dtype=torch.float32).eval()
            torch.testing.assert_close(native(ids).logits, model(ids).logits, atol=2e-4, rtol=0)
            ends = (native.get_input_embeddings(), native.get_output_embeddings())
            assert [type(one) for one in ends] == [QuantisedEmbedding, QuantisedLinear]


def test_a_folder_that_a_read_model_is_saved_in_says_the_same(tmp_path: Path) -> None:
    for name, family in FAMILIES.items():
        model = family_model(family)
        file = write_family(tmp_path / "tiny.gguf", family, model)
        read_weights(file, dtype=torch.float32).save_pretrained(tmp_path / name)
        ids = torch.tensor([prompt_ids()])
        again = read_weights(tmp_path / name, dtype=torch.float32).eval()
        with torch.no_grad():
            torch.testing.assert_close(again(ids).logits, model(ids).logits)


def config_of(folder: Path, name: str, keys: dict[str, Any], **tensors: list[float]) -> Any:
    """Return the config of a family's file with other keys, and with tensors."""
    family = FAMILIES[name]
    words = {f"{family.architecture}.{key}": value for key, value in keys.items()}
    others = {f"{key}.weight": value for key, value in tensors.items()}
    file = folder / "tiny.gguf"
    return read(
        AutoConfig, write_family(file, family, family_model(family), keys=words, tensors=others)
    )


def test_frequencies_of_metas_llama_are_named_and_others_are_kept(tmp_path: Path) -> None:
    assert config_of(tmp_path, "Llama 3.1", {}).rope_parameters["rope_type"] == "llama3"
    family = llama3(ORIGINAL)
    model = family_model(family)
    file = write_family(tmp_path / "tiny.gguf", family, model)
    assert read(AutoConfig, file).rope_parameters["rope_type"] == "longrope"
    expected, found = texts(model, file, "vanilla")
    assert found == expected
    plain = replace(family, tensors={"rope_freqs.weight": [1.0] * 8})
    write_family(file, plain, model)
    assert read(AutoConfig, file).rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    ("name", "keys", "attribute", "expected"),
    [
        ("Gemma 2", {"attention.sliding_window": None}, "sliding_window", 4096),
        ("Gemma 2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping", None),
        (
            "Gemma 2",
            {"attention.sliding_window_pattern": 3},
            "layer_types",
            [SLIDING, SLIDING, FULL],
        ),
        (
            "Gemma 2",
            {"attention.sliding_window_pattern": [False, True, False]},
            "layer_types",
            [FULL, SLIDING, FULL],
        ),
        ("Gemma 2", {"block_count": 46}, "query_pre_attn_scalar", HIDDEN // HEADS),
        ("Gemma 3", {"block_count": 62}, "query_pre_attn_scalar", HIDDEN // HEADS),
        ("Gemma 3", {"attention.sliding_window": None}, "layer_types", [FULL] * 7),
        ("Gemma 3", {"final_logit_softcapping": 5.0}, "final_logit_softcapping", 5.0),
        ("Phi 3", {"attention.sliding_window": WINDOW}, "sliding_window", WINDOW),
        ("OLMo 2", {"attention.key_length": 32, "attention.value_length": 32}, "head_dim", 32),
    ],
)
def test_a_key_is_read(
    name: str, keys: dict[str, Any], attribute: str, expected: Any, tmp_path: Path
) -> None:
    rope = {"rope.dimension_count": 32} if name == "OLMo 2" else {}
    assert getattr(config_of(tmp_path, name, {**keys, **rope}), attribute) == expected


def test_rotary_keys_are_read(tmp_path: Path) -> None:
    local = config_of(tmp_path, "Gemma 3", {"rope.freq_base_swa": 5000.0}).rope_parameters
    assert local[SLIDING]["rope_theta"] == 5000 and local[FULL]["factor"] == 8
    keys = {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_attn_factor": 1.5}
    yarn = config_of(tmp_path, "Qwen 2", keys).rope_parameters
    assert (yarn["beta_fast"], yarn["attention_factor"], yarn["factor"]) == (16, 1.5, 4)
    none = config_of(tmp_path, "Qwen 3", {"rope.scaling.type": "none"}).rope_parameters
    assert none["rope_type"] == "default"
    no_base = config_of(tmp_path, "Qwen 3", {"rope.freq_base": None}).rope_parameters
    assert no_base["rope_theta"] == 10000


def test_biases_are_those_of_the_file(tmp_path: Path) -> None:
    biased = {"attention_bias": True, "mlp_bias": True}
    family = replace(FAMILIES["Llama 3.1"], config={**FAMILIES["Llama 3.1"].config, **biased})
    model = family_model(family)
    found = read_weights(write_family(tmp_path / "tiny.gguf", family, model), dtype=torch.float32)
    for name, weight in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight), name


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        (
            "Llama 3.1",
            {"logit_scale": 0.5},
            r"llama\.logit_scale: got 0\.5; allowed: a file without",
        ),
        ("Llama 3.1", {"expert_used_count": 2}, r"llama\.expert_used_count: got 2; "),
        ("Llama 3.1", {"attention.scale": 0.5}, r"llama\.attention\.scale: got 0\.5; "),
        ("Llama 3.1", {"residual_scale": 0.5}, r"llama\.residual_scale: got 0\.5; "),
        ("Llama 3.1", {"embedding_scale": 2.0}, r"llama\.embedding_scale: got 2\.0; "),
        ("Llama 3.1", {"attention.causal": False}, r"llama\.attention\.causal: got False; "),
        ("Llama 3.1", {"rope.dimension_count": 8}, r"got 8; allowed: 16, the size of a head"),
        (
            "Llama 3.1",
            {"rope.scaling.factor": 4.0},
            r"rope\.scaling\.type: got none; allowed: none, linear",
        ),
        ("Llama 3.1", {"of_tomorrow": "x"}, r"llama\.of_tomorrow: got x; "),
        ("Qwen 2", {"attention.sliding_window": 32}, r"qwen2\.attention\.sliding_window: got 32; "),
        ("Qwen 2", {"rope.scaling.yarn_ext_factor": 0.5}, r"yarn_ext_factor: got 0\.5; "),
        (
            "Qwen 2",
            {"rope.scaling.type": "dynamic"},
            r"rope\.scaling\.type: got dynamic; allowed: ",
        ),
        ("Qwen 3", {"rope.scaling.type": "longrope"}, r"got longrope; allowed: .* its two tensors"),
        ("Qwen 3", {"attention.value_length": 16}, r"value_length: got 16; allowed: 32, as atten"),
        ("OLMo 2", {"attention.sliding_window": 32}, r"olmo2\.attention\.sliding_window: got 32; "),
        ("OLMo 2", {"rope.freq_base_swa": 1e4}, r"olmo2\.rope\.freq_base_swa: got 10000\.0; "),
    ],
)
def test_a_key_that_cannot_be_read_is_refused(
    name: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, name, keys)


SIZES = {
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "block_count": 2,
    "attention.head_count": 4,
}
KV, ROPE = {"attention.head_count_kv": 2}, {"rope.freq_base": 5000.0}
NORM, RMS = {"attention.layer_norm_epsilon": 0.5}, {"attention.layer_norm_rms_epsilon": 0.5}
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
STATES = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16}
# Keys that llama.cpp's converter writes for other architectures, and the norm's epsilon in a config.
CONVERTED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({**NORM, "attention.head_count_kv": 4}, "layer_norm_epsilon"),
    "falcon": (
        {**NORM, "attention.head_count_kv": 1, "tensor_data_layout": "jploski"},
        "layer_norm_epsilon",
    ),
    "gpt2": (NORM, "layer_norm_epsilon"),
    "mamba": (
        {**RMS, **STATES, "ssm.time_step_rank": 4, "ssm.dt_b_c_rms": False},
        "layer_norm_epsilon",
    ),
    "minimax-m2": (
        {**KV, **ROPE, **RMS, **EXPERTS, "expert_gating_func": 2, "rope.dimension_count": 8}
        | {"attention.key_length": 16, "attention.value_length": 16},
        "rms_norm_eps",
    ),
    "nemotron": (
        {
            **KV,
            **ROPE,
            **NORM,
            **RMS,
            "vocab_size": 8,
            "rope.dimension_count": 8,
            "rope.scaling.type": "none",
        },
        "norm_eps",
    ),
    "stablelm": (
        {**KV, **NORM, "rope.dimension_count": 4, "use_parallel_residual": True},
        "layer_norm_eps",
    ),
    "starcoder2": ({**KV, **ROPE, **NORM}, "norm_epsilon"),
    "lfm2": (
        {**ROPE, **RMS, "attention.head_count_kv": [0, 2], "vocab_size": 8, "shortconv.l_cache": 3},
        "norm_eps",
    ),
}


@pytest.mark.parametrize("architecture", CONVERTED)
def test_files_of_other_architectures_are_not_refused(architecture: str, tmp_path: Path) -> None:
    keys, epsilon = CONVERTED[architecture]
    family = Family(architecture, "", {}, {})
    file = write_keys(tmp_path / "tiny.gguf", family, {**SIZES, **keys})
    config = read(AutoConfig, file)
    assert getattr(config, epsilon) == 0.5
    if "rope.freq_base" in keys:
        assert config.rope_parameters["rope_theta"] == 5000
    if "rope.dimension_count" in keys:
        share = keys["rope.dimension_count"] / 16
        assert config.rope_parameters["partial_rotary_factor"] == share


def test_a_key_of_another_architecture_changes_nothing(tmp_path: Path) -> None:
    family = FAMILIES["OLMo 2"]
    keys = {"gemma2.attn_logit_softcapping": 5.0, "my.note": "x", "general.author": "me"}
    file = write_family(tmp_path / "tiny.gguf", family, family_model(family), keys=keys)
    assert not hasattr(read(AutoConfig, file), "attn_logit_softcapping")


@pytest.mark.parametrize(
    "tensor", ["blk.0.attn_sinks.weight", "blk.1.attn_q.scale", "rope_freqs.weight"]
)
def test_a_tensor_that_the_model_has_not_is_refused(tensor: str, tmp_path: Path) -> None:
    family = FAMILIES["Qwen 3"]
    file = tmp_path / "tiny.gguf"
    write_family(file, family, family_model(family), tensors={tensor: [2.0] * 16})
    with pytest.raises(ValueError, match=rf"{tensor}|rope\.scaling\.type: got linear; allowed: "):
        read_weights(file, dtype=torch.float32)


@pytest.mark.parametrize("method", ["vanilla", "recycling"])
def test_a_text_ends_at_each_token_that_the_file_names(method: str, tmp_path: Path) -> None:
    family = FAMILIES["Qwen 3"]
    model = family_model(family)
    file = write_family(tmp_path / "tiny.gguf", family, model)
    whole, _ = texts(model, file, method)
    end = next(token for token in whole[4:] if token not in whole[:4])
    for name in ("eot", "eom"):
        write_family(file, family, model, keys={f"tokenizer.ggml.{name}_token_id": end})
        decoder = SpeculativeDecoder.from_pretrained(file, method, torch.float32)
        output = decoder.generate(prompt_ids(), max_new_tokens=NEW)
        assert output.token_ids == whole[: whole.index(end) + 1]
        assert decoder.target.model.generation_config.eos_token_id == [2, end]
