"""Hydra: its prefix layer, its heads, its tree, and its checkpoints.

Run: pytest tests/model/methods/heads/hydra/test_drafter.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaModel

from model.backends.target import TargetModel
from model.engine.budget import DraftBudget
from model.engine.loop import generate
from model.engine.tree import DraftTree
from model.methods.heads.drafter import tree_of
from model.methods.heads.hydra.drafter import (
    HydraConfig,
    HydraDrafter,
    HydraHeads,
    HydraShape,
    write_hydra,
)
from model.methods.heads.layers import HeadShape
from tests.model.decoded import drafted_paths, drafter_for, random_ids, referee, target_of
from tests.model.families.family import VOCAB

LLAMA = "Llama, grouped heads"
CPU = torch.device("cpu")
PROMPT = random_ids(14, seed=3)
SIZE = 32


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    """Return the tokens of every node's path, without the root."""
    return set(drafted_paths(tree))


def published(folder: Path, target: TargetModel, num_layers: int = 1) -> dict[str, torch.Tensor]:
    """Write random heads with the names of ankner's checkpoints; return the tensors."""
    torch.manual_seed(0)
    layer = "prefix_embeding_layer.layers.0"
    width, wide = 8, 48
    shapes: dict[str, tuple[int, ...]] = {
        "input_embed_fn.weight": (VOCAB, SIZE),
        "prefix_embeding_layer.embed_tokens.weight": (VOCAB, SIZE),
        f"{layer}.self_attn.q_proj.weight": (4 * width, SIZE),
        f"{layer}.self_attn.k_proj.weight": (2 * width, SIZE),
        f"{layer}.self_attn.v_proj.weight": (2 * width, SIZE),
        f"{layer}.self_attn.o_proj.weight": (SIZE, 4 * width),
        f"{layer}.mlp.gate_proj.weight": (wide, SIZE),
        f"{layer}.mlp.up_proj.weight": (wide, SIZE),
        f"{layer}.mlp.down_proj.weight": (SIZE, wide),
        f"{layer}.input_layernorm.weight": (SIZE,),
        f"{layer}.post_attention_layernorm.weight": (SIZE,),
        "prefix_embeding_layer.norm.weight": (SIZE,),
    }
    for head in range(4):
        for name in ("linear", "res_connection"):
            shapes[f"hydra_mlp.{head}.1.{name}.weight"] = (SIZE, (2 + head) * SIZE)
            shapes[f"hydra_mlp.{head}.1.{name}.bias"] = (SIZE,)
        for block in range(1, num_layers):
            shapes[f"hydra_mlp.{head}.{1 + 2 * block}.linear.weight"] = (SIZE, SIZE)
            shapes[f"hydra_mlp.{head}.{1 + 2 * block}.linear.bias"] = (SIZE,)
        shapes[f"hydra_lm_head.{head}.1.weight"] = (VOCAB, SIZE)
        shapes[f"hydra_lm_head.{head}.1.bias"] = (VOCAB,)
    tensors = {name: torch.randn(shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    save(folder, tensors, hydra_num_layers=num_layers)
    return tensors


def save(folder: Path, tensors: dict[str, torch.Tensor], **changed: Any) -> None:
    torch.save(tensors, folder / "hydra_lm_head.pt")
    config = {
        "hydra_num_heads": 4,
        "hydra_num_layers": 1,
        "hydra_head_arch": "prefix-mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    }
    (folder / "config.json").write_text(json.dumps(config | changed))


def prefix_states(
    target: TargetModel, tensors: dict[str, torch.Tensor], hidden: torch.Tensor
) -> torch.Tensor:
    """Return the prefix states [n, D] by transformers' own Llama of one layer, without a cache."""
    config = target.model.config.__class__(**target.model.config.to_dict())
    config.num_hidden_layers = 1
    layer = LlamaModel(config).eval()
    start = "prefix_embeding_layer."
    layer.load_state_dict(
        {name.removeprefix(start): each for name, each in tensors.items() if name.startswith(start)}
    )
    with torch.no_grad():
        found: torch.Tensor = layer(inputs_embeds=hidden[None], use_cache=False)[0][0]
    return found


def guesses(
    target: TargetModel,
    tensors: dict[str, torch.Tensor],
    prefix: torch.Tensor,
    path: tuple[int, ...],
    num_layers: int,
) -> list[int]:
    """Return all tokens in the order of the head after a path (root first), from the paper's formula."""
    embedding = target.model.get_input_embeddings().weight.detach()
    head = len(path) - 1
    inputs = torch.cat((prefix, *(embedding[token] for token in path)))
    row = inputs
    for block in range(num_layers):
        name = f"hydra_mlp.{head}.{1 + 2 * block}"
        inner = tensors[f"{name}.linear.weight"] @ row + tensors[f"{name}.linear.bias"]
        if block == 0:
            skipped = tensors[f"{name}.res_connection.weight"] @ row
            skipped = skipped + tensors[f"{name}.res_connection.bias"]
        else:
            skipped = row
        row = skipped + inner * torch.sigmoid(inner)
    weight, bias = (tensors[f"hydra_lm_head.{head}.1.{part}"] for part in ("weight", "bias"))
    order: list[int] = (weight @ row + bias).sort(descending=True).indices.tolist()
    return order


def expected_paths(
    target: TargetModel,
    tensors: dict[str, torch.Tensor],
    prefix: torch.Tensor,
    root: int,
    ranks: list[tuple[int, ...]],
    num_layers: int = 1,
) -> set[tuple[int, ...]]:
    """Return the drafted paths, each worked out on its own."""
    found = set()
    for path in ranks:
        tokens: tuple[int, ...] = (root,)
        for rank in path:
            tokens += (guesses(target, tensors, prefix, tokens, num_layers)[rank],)
        found.add(tokens[1:])
    return found


@pytest.mark.parametrize(("num_layers", "num_nodes"), [(1, 63), (3, 63), (1, 11)])
def test_each_path_has_the_guesses_that_follow_it(
    tmp_path: Path, num_layers: int, num_nodes: int
) -> None:
    target = target_of(LLAMA)
    tensors = published(tmp_path, target, num_layers)
    drafter = drafter_for("hydra", target, heads=str(tmp_path), num_nodes=num_nodes)
    drafter.for_target(target)
    drafter.start(PROMPT)
    hidden = torch.randn(len(PROMPT) - 1, SIZE)
    for part in (slice(0, 5), slice(5, None)):  # a prompt in two chunks
        drafter.observe_prompt_hidden(PROMPT[:-1][part], hidden[part])
    tree = drafter.propose(PROMPT, DraftBudget(100))
    prefix = prefix_states(target, tensors, hidden)[-1]
    ranks = tree_of(num_nodes, 4, 10).paths
    expected = expected_paths(target, tensors, prefix, PROMPT[-1], ranks, num_layers)
    assert paths_of(tree) == expected
    assert tree.topology.num_nodes == 1 + num_nodes == drafter.max_nodes


def test_the_prefix_follows_the_accepted_text(tmp_path: Path) -> None:
    target = target_of(LLAMA)
    tensors = published(tmp_path, target)
    drafter = drafter_for("hydra", target, heads=str(tmp_path), num_nodes=9)
    answer = generate(target, drafter, PROMPT, max_new_tokens=16)
    assert answer.token_ids == referee(target, PROMPT, 16)
    text, ranks = list(PROMPT), tree_of(9, 4, 10).paths
    for step in answer.steps:
        with torch.inference_mode():  # a pass of transformers' own over the text so far
            output = target.model(torch.tensor([text]), output_hidden_states=True)
        prefix = prefix_states(target, tensors, output.hidden_states[-1][0, :-1])[-1]
        depth = step.tree.topology.max_depth
        within = [path for path in ranks if len(path) <= depth]
        assert paths_of(step.tree) == expected_paths(target, tensors, prefix, text[-1], within)
        text += step.tokens


def test_a_second_text_begins_anew(tmp_path: Path) -> None:
    target = target_of(LLAMA)
    published(tmp_path, target)
    used, fresh = (drafter_for("hydra", target, heads=str(tmp_path)) for _ in range(2))
    generate(target, used, random_ids(20, seed=8), max_new_tokens=9)
    first, second = (
        generate(target, drafter, PROMPT, max_new_tokens=9).steps for drafter in (used, fresh)
    )
    assert [paths_of(step.tree) for step in first] == [paths_of(step.tree) for step in second]


def test_heads_without_outputs_go_through_the_models_own(tmp_path: Path) -> None:
    target = target_of(LLAMA)
    torch.manual_seed(1)
    heads = HydraHeads(HydraShape(2, 1, None), HeadShape.of_config(target.config))
    write_hydra(tmp_path, heads, "tiny")
    assert not any("lm_head" in name for name in load_file(tmp_path / "hydra_lm_head.safetensors"))
    drafter = drafter_for("hydra", target, heads=str(tmp_path))
    drafter.for_target(target)
    drafter.start(PROMPT)
    hidden = torch.randn(1, SIZE)
    drafter.observe_prompt_hidden(PROMPT[:1], hidden)
    tree = drafter.propose(PROMPT, DraftBudget(1, chain_only=True))
    with torch.no_grad():
        embedded = target.model.get_input_embeddings()(torch.tensor(PROMPT[-1]))
        prefix = heads.prefix_embeding_layer(hidden)[-1]
        state = heads.states(0, torch.cat((prefix, embedded)))
        guess = target.model.get_output_embeddings()(state).argmax().item()
    assert tree.token_ids.tolist() == [PROMPT[-1], guess]


def test_a_prompt_of_one_token_is_answered_without_a_first_draft() -> None:
    target = target_of(LLAMA)
    answer = generate(target, drafter_for("hydra", target), [5], max_new_tokens=12)
    assert answer.steps[0].num_nodes == 1
    assert max(step.num_nodes for step in answer.steps) == 64
    assert answer.token_ids == referee(target, [5], 12)


def refusal(folder: Path, target: TargetModel, vocab_size: int = VOCAB) -> str:
    with pytest.raises(ValueError, match="heads") as error:
        HydraDrafter(HydraConfig(heads=str(folder)), vocab_size, CPU).check_target(target)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    target = target_of(LLAMA)
    assert "has no hydra_lm_head.safetensors or hydra_lm_head.pt" in refusal(tmp_path, target)
    tensors = published(tmp_path, target)
    HydraDrafter(HydraConfig(heads=str(tmp_path)), VOCAB, CPU).check_target(target)
    assert f"have a vocabulary of {VOCAB} tokens; allowed: 99" in refusal(tmp_path, target, 99)
    for config, says in (
        ({"hydra_head_arch": "eagle-attn"}, "hydra_head_arch 'eagle-attn'"),
        ({"grounded_heads": False}, "grounded_heads False"),
        ({"hidden_state_offset": 1}, "hidden_state_offset 1"),
        ({"hydra_num_heads": 3}, "has a tensor hydra_lm_head.3.1.bias"),
        ({"hydra_num_layers": 2}, "hydra_mlp.0.3.linear.bias is missing"),
    ):
        save(tmp_path, tensors, **config)
        assert says in refusal(tmp_path, target)
    name = "prefix_embeding_layer.layers.0.self_attn.k_proj.weight"
    save(tmp_path, {**tensors, name: torch.zeros(SIZE, SIZE)})
    assert f"{name} has shape [32, 32]; allowed: [16, 32]" in refusal(tmp_path, target)


def test_models_without_such_a_layer_are_refused() -> None:
    with pytest.raises(ValueError, match="model type gpt2: these heads have a layer of the model"):
        HeadShape.of_config(target_of("GPT-2").config)
