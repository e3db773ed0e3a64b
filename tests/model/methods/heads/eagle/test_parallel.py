"""P-EAGLE guesses what its authors' network guesses, and keeps the rows of a text as a fresh reading has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from model.engine.budget import DraftBudget
from model.engine.loop import generate
from model.methods import drafter_class
from model.methods.heads.eagle.drafter import build_network, open_checkpoint
from model.methods.heads.eagle.network import ParallelNetwork
from model.methods.heads.eagle.parallel import ParallelText, PEagleConfig, PEagleDrafter
from tests.model.decoded import random_ids, referee, target_of
from tests.model.families.family import VOCAB
from tests.model.methods.heads.eagle.tiny_heads import (
    HIDDEN,
    MLP,
    attention,
    config_of,
    eagle3_shapes,
    random_tensors,
    write,
)

LLAMA = "Llama, grouped heads"
PROMPT = random_ids(20, seed=1)
CPU = torch.device("cpu")
NUM_GUESSES = 4


def peagle(folder: Path, is_qwen3: bool = False, **changes: Any) -> str:
    """Write a random checkpoint of two layers, with the names of speculators."""
    norms = {"input_layernorm.weight": (HIDDEN,)}
    of_heads = {f"self_attn.{name}_norm.weight": (8,) for name in "qk"} if is_qwen3 else {}
    later = attention(HIDDEN) | MLP | norms | of_heads
    shapes = {
        name.replace("midlayer.", "layers.0."): shape
        for name, shape in eagle3_shapes(VOCAB).items()
    }
    shapes |= {f"layers.0.{name}": shape for name, shape in of_heads.items()}
    shapes |= {f"layers.1.{name}": shape for name, shape in later.items()}
    shapes |= {"embed_tokens.weight": (VOCAB, HIDDEN), "mask_hidden": (1, 1, 3 * HIDDEN)}
    kind = "qwen3" if is_qwen3 else "llama"
    config = {
        "speculators_model_type": "peagle",
        "transformer_layer_config": config_of(
            VOCAB, model_type=kind, head_dim=8, num_hidden_layers=2
        ),
        "draft_vocab_size": VOCAB,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 1],
        "mask_token_id": 5,
        "speculators_config": {"proposal_methods": [{"speculative_tokens": NUM_GUESSES}]},
    }
    return write(folder, config | changes, random_tensors(shapes))


def drafter_of(heads: str, **options: Any) -> PEagleDrafter:
    """A drafter that was checked against its target."""
    target = target_of(LLAMA)
    drafter = PEagleDrafter(PEagleConfig(heads=heads, **options), target.vocab_size, target.device)
    drafter.check_target(target)
    return drafter


def test_a_text_is_that_of_plain_decoding(tmp_path: Path) -> None:
    target, drafter = target_of(LLAMA), drafter_of(peagle(tmp_path))
    answer = generate(target, drafter, PROMPT, max_new_tokens=40)
    assert answer.token_ids == referee(target, PROMPT, 40)
    assert {step.num_nodes for step in answer.steps[:-NUM_GUESSES]} == {1 + NUM_GUESSES}


def test_every_draft_is_that_of_the_text_read_afresh(tmp_path: Path) -> None:
    target, drafter = target_of(LLAMA), drafter_of(peagle(tmp_path))
    fresh, text = drafter_of(peagle(tmp_path)), list(PROMPT)
    for step in generate(target, drafter, PROMPT, max_new_tokens=24).steps[:-NUM_GUESSES]:
        with torch.inference_mode():
            output = target.model(
                torch.tensor([text[:-1]]), use_cache=False, output_hidden_states=True
            )
        layers = fresh.needs.hidden_layers
        hidden = torch.cat([output.hidden_states[layer][0] for layer in layers], dim=-1)
        fresh.start(text)
        fresh.observe_prompt_hidden(text[:-1], hidden)
        again = fresh.propose(text, DraftBudget(max_depth=32))
        assert again.token_ids.tolist() == step.tree.token_ids.tolist()
        text += step.tokens


def test_guesses_are_those_of_the_authors_network(tmp_path: Path) -> None:
    """Recorded from the layers and the mask of speculators at c05b95b."""
    tokens = [[13, 62, 42], [65, 29, 31], [65, 29, 1], [65, 1, 29]]
    recorded = [
        [-2.5267475, -2.6118603, -2.787034],
        [-2.4667072, -2.6231127, -2.825387],
        [-2.5247157, -2.7927864, -2.8009405],
        [-2.2948699, -2.8036656, -2.9347639],
    ]
    checkpoint = open_checkpoint(peagle(tmp_path, is_qwen3=True), ParallelNetwork)
    network = build_network(checkpoint, CPU, torch.float32)
    assert isinstance(network, ParallelNetwork)
    text = ParallelText(network, target_of(LLAMA))
    hidden = torch.randn(6, 3 * HIDDEN, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        text.read([7, 1, 30, 22, 9, 14], hidden)
        found = text.guesses(NUM_GUESSES, 3)
        assert found is not None
        again = text.guesses(NUM_GUESSES, 3)
    assert again == found
    assert found[0] == tokens
    assert found[1] == [pytest.approx(row, abs=1e-5) for row in recorded]


def test_the_hybrid_makes_a_tree_of_the_guesses(tmp_path: Path) -> None:
    target, cls = target_of(LLAMA), drafter_class("hybrid")
    config = cls.config_class(head=f"peagle={peagle(tmp_path)}", budget="fixed", num_nodes=15)
    drafter = cls(config, target.vocab_size, target.device)
    drafter.check_target(target)
    answer = generate(target, drafter, PROMPT, max_new_tokens=24)
    assert answer.token_ids == referee(target, PROMPT, 24)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": VOCAB}, "mask_token_id"),
        ({"norm_output": True}, "norm_output is True; allowed: False"),
        ({"speculators_model_type": "eagle3"}, "its type eagle3.*or its types peagle"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_checkpoint(peagle(tmp_path, **changes), ParallelNetwork)


def test_fewer_guesses_than_trained(tmp_path: Path) -> None:
    assert drafter_of(peagle(tmp_path), num_guesses=2).max_nodes == 3


def test_a_checkpoint_is_written_as_it_is_read(tmp_path: Path) -> None:
    target = target_of(LLAMA)
    PEagleDrafter.write_untrained_heads(tmp_path, target.config)
    assert open_checkpoint(str(tmp_path), ParallelNetwork).shape.num_layers == 2
