"""The law of enlargement: any larger shape computes the small model's float32 logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from model.commands.command_line import UserError
from scripts import enlarge
from scripts.enlarge import SHAPES, scale_config, scaled_model, shape_of, write_scaled
from tests.random_llama import random_llama

VOCAB = 97


def small_model(kv_heads: int = 2, is_tied: bool = True) -> LlamaForCausalLM:
    """A random Llama with large weights, so that a wrong place shows in the logits."""
    options = {"num_key_value_heads": kv_heads, "tie_word_embeddings": is_tied}
    model = random_llama(VOCAB, 1, max_position_embeddings=128, pad_token_id=0, **options)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def assert_same(small: LlamaForCausalLM, large: LlamaForCausalLM) -> None:
    """Logits to 1e-4 and the same greedy continuation."""
    token_ids = torch.randint(3, VOCAB, (2, 40))
    with torch.no_grad():
        expected, got = small(token_ids).logits, large(token_ids).logits
    assert expected.std() > 0.1  # otherwise the comparison below means nothing
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    options = {"max_new_tokens": 20, "do_sample": False}
    prompt = token_ids[:1, :8]
    assert small.generate(prompt, **options).tolist() == large.generate(prompt, **options).tolist()


@pytest.mark.parametrize(
    "shape",
    [
        shape_of(layers=2, hidden=32, heads=4, intermediate=48, kv_heads=4),
        shape_of(layers=5, hidden=32, heads=4, intermediate=48, kv_heads=4),
        shape_of(layers=2, hidden=64, heads=8, intermediate=48, kv_heads=8),
        shape_of(layers=2, hidden=64, heads=4, intermediate=48, kv_heads=4),
        shape_of(layers=3, hidden=96, heads=4, intermediate=100, kv_heads=4),
        shape_of(layers=3, hidden=128, heads=8, intermediate=256, kv_heads=4),
        shape_of(layers=3, hidden=96, heads=12, intermediate=49, kv_heads=4),
        shape_of(layers=4, hidden=192, heads=6, intermediate=64, kv_heads=6),
    ],
    ids=lambda shape: str([*shape.values()]),
)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_logits_and_greedy_tokens_stay(shape: dict[str, int], kv_heads: int) -> None:
    small = small_model(kv_heads)
    assert_same(small, scaled_model(small, shape))


def test_untied_head() -> None:
    small = small_model(is_tied=False)
    assert_same(small, scaled_model(small, shape_of(3, 64, 8, 96, 8)))


def test_added_parts_are_random_and_their_way_out_is_zero() -> None:
    large = scaled_model(small_model(), shape_of(3, 64, 8, 96, 8))
    added = large.model.layers[2]
    assert added.self_attn.q_proj.weight.std() > 0
    assert added.mlp.gate_proj.weight.std() > 0
    assert added.self_attn.o_proj.weight.abs().max() == 0
    assert added.mlp.down_proj.weight.abs().max() == 0
    first = large.model.layers[0].mlp
    assert first.up_proj.weight[48:].std() > 0
    assert first.down_proj.weight[:, 48:].abs().max() == 0


@pytest.mark.parametrize("shard_bytes", [10_000, 10**9])
def test_written_model_equals_the_one_in_memory(
    tmp_path: Path, shard_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enlarge, "SHARD_BYTES", shard_bytes)
    small = small_model()
    small.save_pretrained(tmp_path / "small")
    shape = shape_of(3, 64, 4, 96, 4)
    count = write_scaled(tmp_path / "small", tmp_path / "large", shape, torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "large").eval()
    assert count == sum(parameter.numel() for parameter in loaded.parameters())
    assert_same(small, loaded)
    in_memory = scaled_model(small, shape)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, in_memory.state_dict()[name]), name


def test_named_shapes_hold_the_demo_model() -> None:
    demo = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=704,
    )
    for name in SHAPES:
        assert scale_config(demo, SHAPES[name]).hidden_size == SHAPES[name]["hidden_size"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 64, 4, 96, 4), "num_hidden_layers: got 1; allowed for this model: 2 or more"),
        ((2, 48, 4, 96, 4), "head_dim: got 12; allowed for this model: multiples of 8"),
        ((2, 64, 4, 40, 4), "intermediate_size: got 40"),
        ((2, 64, 4, 96, 1), "num_key_value_heads: got 1; allowed for this model: 2 or more"),
    ],
)
def test_shapes_that_cannot_hold_the_model_are_refused(
    sizes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        scaled_model(small_model(), shape_of(*sizes))


def test_models_that_are_no_plain_llama_are_refused() -> None:
    config = LlamaConfig(attention_bias=True)
    with pytest.raises(ValueError, match="allowed: llama without biases"):
        scale_config(config, SHAPES["7b"])


def test_existing_folder_and_missing_model_are_refused(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path / "small")
    taken = ["--model", str(tmp_path / "small"), "--out", str(tmp_path), "--shape", "150m"]
    missing = ["--model", str(tmp_path / "none"), "--out", str(tmp_path / "o"), "--shape", "150m"]
    with pytest.raises(UserError, match="exists"):
        enlarge.main(taken)
    with pytest.raises(UserError, match=r"config\.json"):
        enlarge.main(missing)


def test_a_folder_without_weights_and_one_that_cannot_be_made_are_one_line(tmp_path: Path) -> None:
    small = small_model()
    small.save_pretrained(tmp_path / "small")
    small.config.save_pretrained(tmp_path / "bare")
    (tmp_path / "file").touch()
    shape = ["--shape", "150m"]
    for source, out, says in (
        ("bare", "out", "no file named"),
        ("small", "file/out", "Not a directory"),
    ):
        words = ["--model", str(tmp_path / source), "--out", str(tmp_path / out), *shape]
        with pytest.raises(UserError, match=says):
            enlarge.main(words)
