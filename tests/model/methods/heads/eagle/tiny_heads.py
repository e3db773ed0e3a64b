"""Checkpoints of EAGLE's formats in tiny shapes, with the names of the published files written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# D 32, as the tests' models; 4 heads of 8, 2 key-value heads; 48 wide in between.
HIDDEN, WIDE, KEY_VALUE = 32, 48, 16
MLP = {
    "mlp.gate_proj.weight": (WIDE, HIDDEN),
    "mlp.up_proj.weight": (WIDE, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, WIDE),
    "post_attention_layernorm.weight": (HIDDEN,),
}


def attention(width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of an attention that reads rows of a width."""
    return {
        "self_attn.q_proj.weight": (HIDDEN, width),
        "self_attn.k_proj.weight": (KEY_VALUE, width),
        "self_attn.v_proj.weight": (KEY_VALUE, width),
        "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    }


def eagle_shapes() -> dict[str, tuple[int, ...]]:
    """Shapes of EAGLE's tensors, without the embedding."""
    layer = attention(HIDDEN) | MLP
    joining = {"fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,)}
    return joining | {f"layers.0.{name}": shape for name, shape in layer.items()}


def eagle3_shapes(draft_vocab: int) -> dict[str, tuple[int, ...]]:
    """Shapes of EAGLE-3's tensors, without the tables of its vocabulary."""
    norms = {"hidden_norm.weight": (HIDDEN,), "input_layernorm.weight": (HIDDEN,)}
    layer = attention(2 * HIDDEN) | MLP | norms
    around = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (draft_vocab, HIDDEN),
    }
    return around | {f"midlayer.{name}": shape for name, shape in layer.items()}


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random matrices, and norms near 1."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: 1 + 0.1 * one if "norm" in name else 0.15 * one for name, one in drawn.items()}


def config_of(vocab: int, **more: Any) -> dict[str, Any]:
    """The config of a checkpoint."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        **more,
    }


def eagle_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """EAGLE's tensors."""
    return random_tensors(eagle_shapes(), seed)


def eagle3_tensors(vocab: int, draft_vocab: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """EAGLE-3's tensors; every other token from 1 on can be drafted."""
    tensors = random_tensors(eagle3_shapes(draft_vocab), seed)
    chosen = torch.arange(1, vocab, 2)[:draft_vocab]
    can_draft = torch.zeros(vocab, dtype=torch.bool)
    can_draft[chosen] = True
    return tensors | {"d2t": chosen - torch.arange(draft_vocab), "t2d": can_draft}


def write(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], is_bin: bool = False
) -> str:
    """Write a checkpoint; return its folder's name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if is_bin:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return str(folder)


def write_heads(folder: Path, method: str, vocab: int, seed: int = 0) -> str:
    """Write a random checkpoint for a method; return its folder's name."""
    if method != "eagle3":
        return write(folder, config_of(vocab), eagle_tensors(seed), is_bin=True)
    draft_vocab = vocab // 2 - 2
    config = config_of(vocab, draft_vocab_size=draft_vocab, hidden_layers=[0, 1, 1])
    return write(folder, config, eagle3_tensors(vocab, draft_vocab, seed))
