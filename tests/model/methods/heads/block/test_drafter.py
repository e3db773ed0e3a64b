"""A block drafter guesses what a pass without a cache guesses, in every form of checkpoint, and drafts it.

Run: pytest tests/model/methods/heads/block/test_drafter.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from model.engine.budget import DraftBudget
from model.engine.loop import generate
from model.methods.heads.block.drafter import Block, DFlashConfig, DFlashDrafter
from tests.model.decoded import random_ids, referee, target_of

LLAMA = "Llama, grouped heads"
CPU = torch.device("cpu")
ROOMY = DraftBudget(24)
PROMPT = random_ids(12, 20)
# Of the shared model, and of the networks.
SIZE, VOCAB = 32, 67
NUM_LAYERS, BLOCK, MASK, RANK = 2, 5, 3, 4
OUTPUTS = [-1, 0, 1]


def layers_config(**changes: Any) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "hidden_size": SIZE,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_hidden_layers": NUM_LAYERS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "layer_types": ["full_attention"] * NUM_LAYERS,
        "attention_bias": False,
        "vocab_size": VOCAB,
    } | changes


def tensors_of(**more: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return random weights of a network, and more of these shapes; dots in names are double underscores."""
    size, heads, kv_heads, dim = SIZE, 2, 1, 8
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, len(OUTPUTS) * size)}
    shapes |= {"hidden_norm.weight": (size,), "norm.weight": (size,)}
    for layer in range(NUM_LAYERS):
        shapes |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (size,),
                "post_attention_layernorm": (size,),
                "self_attn.q_proj": (heads * dim, size),
                "self_attn.k_proj": (kv_heads * dim, size),
                "self_attn.v_proj": (kv_heads * dim, size),
                "self_attn.o_proj": (size, heads * dim),
                "self_attn.q_norm": (dim,),
                "self_attn.k_norm": (dim,),
                "mlp.gate_proj": (24, size),
                "mlp.up_proj": (24, size),
                "mlp.down_proj": (size, 24),
            }.items()
        }
    shapes |= {name.replace("__", "."): shape for name, shape in more.items()}
    source = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(shape, generator=source) * 0.3 + ("norm" in name)
        for name, shape in shapes.items()
    }


MARKOV = {
    "markov_head__markov_w1__weight": (VOCAB, RANK),
    "markov_head__markov_w2__weight": (VOCAB, RANK),
}
CONFIDENCE = {
    "confidence_head__proj__weight": (1, SIZE + RANK),
    "confidence_head__proj__bias": (1,),
}
# The forms of checkpoints: config, tensors, whether row i guesses the token after its place.
FORMS: Mapping[str, tuple[dict[str, Any], dict[str, torch.Tensor], bool]] = {
    "z-lab": (
        layers_config(
            block_size=BLOCK, dflash_config={"target_layer_ids": OUTPUTS, "mask_token_id": MASK}
        ),
        tensors_of(),
        False,
    ),
    "DeepSpec": (
        layers_config(
            block_size=BLOCK,
            target_layer_ids=OUTPUTS,
            mask_token_id=MASK,
            markov_rank=RANK,
            markov_head_type="vanilla",
            confidence_head_with_markov=True,
        ),
        tensors_of(**MARKOV, **CONFIDENCE),
        True,
    ),
    "speculators": (
        {
            "speculators_model_type": "dspark",
            "transformer_layer_config": layers_config(),
            "aux_hidden_state_layer_ids": [one + 1 for one in OUTPUTS],
            "block_size": BLOCK,
            "mask_token_id": MASK,
            "sample_from_anchor": True,
            "markov_rank": RANK,
            "draft_vocab_size": VOCAB,
        },
        tensors_of(**MARKOV, verifier_norm__weight=(3,)),
        True,
    ),
}


def written(folder: Path, config: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def drafter_of(folder: str, **options: Any) -> DFlashDrafter:
    target = target_of(LLAMA)
    drafter = DFlashDrafter(DFlashConfig(heads=folder, **options), target.vocab_size, CPU)
    drafter.check_target(target)
    return drafter


class Reference:
    """The block after a text, by one pass over all rows without a cache, written from the papers."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], guesses_at_root: bool) -> None:
        self.w, self.at_root = tensors, guesses_at_root

    @torch.inference_mode()
    def block(self, text: Sequence[int]) -> Block:
        w, model = self.w, target_of(LLAMA).model
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        joined = torch.cat([states[one + 1][0, :-1] for one in OUTPUTS], dim=-1)
        context = self.norm(joined @ w["fc.weight"].T, "hidden_norm")
        ids = torch.tensor([text[-1], *[MASK] * (BLOCK - 1)])
        rows = model.get_input_embeddings()(ids)
        for layer in range(NUM_LAYERS):
            rows = self.layer(f"layers.{layer}", context, rows)
        rows = self.norm(rows, "norm")[0 if self.at_root else 1 :]
        logits = model.get_output_embeddings()(rows)
        likely, values, confidences, before = [], [], list[float](), text[-1]
        for row, state in zip(logits, rows, strict=True):
            if "markov_head.markov_w1.weight" in w:
                row = (
                    row
                    + w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][before]
                )
            if "confidence_head.proj.weight" in w:
                read = torch.cat((state, w["markov_head.markov_w1.weight"][before]))
                found = w["confidence_head.proj.weight"] @ read + w["confidence_head.proj.bias"]
                confidences.append(float(found.sigmoid()))
            top = row.log_softmax(-1).topk(4)
            likely.append(top.indices.tolist())
            values.append(top.values.tolist())
            before = likely[-1][0]
        return Block([row[0] for row in likely], likely, values, confidences or None)

    def norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return (
            rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6) * self.w[f"{name}.weight"]
        )

    def layer(self, name: str, context: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        w, count, length = self.w, len(rows), len(context)
        normed = self.norm(rows, f"{name}.input_layernorm")
        places = torch.arange(length + count)

        def projected(which: str, read: torch.Tensor) -> torch.Tensor:
            return (read @ w[f"{name}.self_attn.{which}_proj.weight"].T).unflatten(-1, (-1, 8))

        def rotated(heads: torch.Tensor, at: torch.Tensor, which: str) -> torch.Tensor:
            heads = self.norm(heads, f"{name}.self_attn.{which}_norm")
            angles = at[:, None, None] / 10000.0 ** (torch.arange(4) / 4)
            first, second = heads[..., :4], heads[..., 4:]
            return torch.cat(
                (
                    first * angles.cos() - second * angles.sin(),
                    second * angles.cos() + first * angles.sin(),
                ),
                dim=-1,
            )

        both = torch.cat((context, normed))
        queries = rotated(projected("q", normed), places[length:], "q")
        keys, values = rotated(projected("k", both), places, "k"), projected("v", both)
        shares = (torch.einsum("qhd,kd->hqk", queries, keys[:, 0]) / math.sqrt(8)).softmax(-1)
        attended = torch.einsum("hqk,kd->qhd", shares, values[:, 0]).flatten(-2)
        rows = rows + attended @ w[f"{name}.self_attn.o_proj.weight"].T
        read = self.norm(rows, f"{name}.post_attention_layernorm")
        gate, up = (read @ w[f"{name}.mlp.{which}_proj.weight"].T for which in ("gate", "up"))
        return rows + (F.silu(gate) * up) @ w[f"{name}.mlp.down_proj.weight"].T


@pytest.mark.parametrize("form", FORMS)
def test_blocks_are_those_of_passes_without_a_cache(form: str, tmp_path: Path) -> None:
    config, tensors, at_root = FORMS[form]
    drafter = drafter_of(written(tmp_path, config, tensors))
    reference = Reference(tensors, at_root)
    target, text = target_of(LLAMA), list(PROMPT)
    expected = referee(target, PROMPT, 30)
    drafts = []
    propose = drafter.propose

    def watched(context: Sequence[int], budget: DraftBudget) -> Any:
        found = drafter._block(context, budget, 4)
        wanted = reference.block(context)
        assert found is not None and found.tokens == wanted.tokens and found.likely == wanted.likely
        for ours, theirs in zip(found.log_probabilities, wanted.log_probabilities, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
        assert (found.confidences is None) == (wanted.confidences is None)
        if wanted.confidences is not None:
            assert found.confidences == pytest.approx(wanted.confidences, abs=1e-4)
        drafts.append(found.tokens)
        return propose(context, budget)

    drafter.propose = watched  # type: ignore[method-assign]
    answer = generate(target, drafter, PROMPT, max_new_tokens=30)
    assert answer.token_ids == expected
    assert len(drafts) == len(answer.steps) and len({tuple(one) for one in drafts}) > 3
    assert {len(one) for one in drafts} == {BLOCK if at_root else BLOCK - 1}
    assert text == list(PROMPT)


def test_a_chain_ends_at_its_limits_and_where_confidence_is_low(tmp_path: Path) -> None:
    config, tensors, _ = FORMS["DeepSpec"]
    folder = written(tmp_path, config, tensors)
    target = target_of(LLAMA)
    found = {}
    for confidence in (0.0, 0.5, 1.0):
        drafter = drafter_of(folder, confidence=confidence)
        sizes = [
            step.tree.topology.num_nodes
            for step in generate(target, drafter, PROMPT, max_new_tokens=30).steps
        ]
        found[confidence] = sum(sizes) / len(sizes)
    assert found[0.0] == 1 + BLOCK and found[1.0] == 1
    assert 1 < found[0.5] < 1 + BLOCK
    drafter = drafter_of(folder)
    drafter.start(PROMPT)
    assert drafter.propose(PROMPT, ROOMY).topology.num_nodes == 1, "no text was read"
    config, tensors, _ = FORMS["z-lab"]
    with pytest.raises(ValueError, match=r"confidence: got 0.5; allowed: 0, since heads"):
        drafter_of(written(tmp_path, config, tensors), confidence=0.5)


def test_an_own_vocabulary_and_head_give_token_ids(tmp_path: Path) -> None:
    config, _, _ = FORMS["speculators"]
    markov = {
        "markov_head__markov_w1__weight": (VOCAB, RANK),
        "markov_head__markov_w2__weight": (8, RANK),
    }
    tensors = tensors_of(**markov, lm_head__weight=(8, SIZE))
    chosen = torch.arange(0, 16, 2)
    tensors["d2t"] = chosen - torch.arange(8)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    tensors["t2d"][chosen] = True
    drafter = drafter_of(written(tmp_path, {**config, "draft_vocab_size": 8}, tensors))
    target = target_of(LLAMA)
    answer = generate(target, drafter, PROMPT, max_new_tokens=12)
    assert answer.token_ids == referee(target, PROMPT, 12)
    drafted = {int(token) for step in answer.steps for token in step.tree.token_ids[1:]}
    assert drafted and drafted <= set(chosen.tolist())
    tensors["d2t"] = tensors["d2t"] + 1
    with pytest.raises(ValueError, match="d2t and t2d name different tokens"):
        drafter_of(written(tmp_path, {**config, "draft_vocab_size": 8}, tensors))


WRONG: Mapping[str, tuple[dict[str, Any], str]] = {
    "mask_token_id": ({"mask_token_id": None}, "has mask_token_id None; allowed: a token, 0 to"),
    "block_size": ({"block_size": 1}, "has block_size 1; allowed: an integer of 2 or more"),
    "target_layer_ids": (
        {"target_layer_ids": [-2]},
        r"has target_layer_ids \[-2\]; allowed: a list",
    ),
    "layers": (
        {"target_layer_ids": [0, 1, 9]},
        "read the outputs of layers 0, 1, 9; allowed: -1 to",
    ),
    "markov": ({"markov_head_type": "rnn"}, "has markov_head_type 'rnn'; allowed: vanilla"),
    "bias": ({"attention_bias": True}, "attention_bias is True; allowed: False"),
    "windows": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types is 'full_attention, sliding_attention'; allowed: 'full_attention'",
    ),
    "gemma": (
        {"hidden_act": "gelu_pytorch_tanh"},
        "hidden_act is 'gelu_pytorch_tanh'; allowed: 'silu'",
    ),
    "rope": ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling is 'yarn'; allowed: 'default'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_not_supported_is_named(wrong: str, tmp_path: Path) -> None:
    config, tensors, _ = FORMS["DeepSpec"]
    changes, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        drafter_of(written(tmp_path, config | changes, tensors))


def test_other_types_of_speculators_and_other_models_heads_are_refused(tmp_path: Path) -> None:
    config, tensors, _ = FORMS["speculators"]
    with pytest.raises(ValueError, match=r"its type peagle.*, or its types dflash, dspark"):
        drafter_of(written(tmp_path, config | {"speculators_model_type": "peagle"}, tensors))
    own = target_of(LLAMA).model.get_input_embeddings().weight.detach()
    drafter_of(written(tmp_path, config, tensors | {"embed_tokens.weight": own.clone()}))
    with pytest.raises(ValueError, match="were trained for another model"):
        drafter_of(
            written(tmp_path, config, tensors | {"embed_tokens.weight": own.flip(0).clone()})
        )
    del tensors["fc.weight"]
    with pytest.raises(ValueError, match=r"the tensor fc.weight is missing"):
        drafter_of(written(tmp_path, config, tensors))
