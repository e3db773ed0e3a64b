"""Medusa: its tree, its heads, and its checkpoints.

Run: pytest tests/model/methods/heads/medusa/test_drafter.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from model.backends.target import TargetModel
from model.commands.model_options import DEMO_MODEL
from model.engine.budget import DraftBudget
from model.engine.loop import generate
from model.engine.tree import DraftTree
from model.methods.heads.drafter import tree_of
from model.methods.heads.medusa.drafter import (
    MedusaConfig,
    MedusaDrafter,
    MedusaHeads,
    MedusaShape,
    write_medusa,
)
from tests.model.decoded import (
    drafted_paths,
    drafter_for,
    heads_folder,
    random_ids,
    referee,
    target_of,
)
from tests.model.families.family import VOCAB

LLAMA = "Llama, grouped heads"
CPU = torch.device("cpu")
PROMPT = random_ids(14, seed=3)
SIZE = 32
SMALL = LlamaConfig(vocab_size=VOCAB, hidden_size=16, num_attention_heads=2)


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    """Return the tokens of every node's path, without the root."""
    return set(drafted_paths(tree))


def published(folder: Path, num_heads: int, num_layers: int = 1) -> dict[str, torch.Tensor]:
    """Write heads in the form of FasterDecoding's checkpoints; return the tensors."""
    torch.manual_seed(num_heads)
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(SIZE, SIZE) / 4
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(SIZE) / 4
        tensors[f"{head}.{num_layers}.weight"] = torch.randn(VOCAB, SIZE)
    torch.save(tensors, folder / "medusa_lm_head.pt")
    # The published config says 2 heads, whatever the file holds.
    config = {
        "medusa_num_heads": 2,
        "medusa_num_layers": num_layers,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def expected_paths(
    tensors: dict[str, torch.Tensor], state: torch.Tensor, num_layers: int, num_nodes: int
) -> set[tuple[int, ...]]:
    """Return the drafted paths, worked out head by head from the paper's formula."""
    ranked = []
    for head in range(4):
        row = state
        for layer in range(num_layers):
            name = f"{head}.{layer}.linear"
            inner = tensors[f"{name}.weight"] @ row + tensors[f"{name}.bias"]
            row = row + inner * torch.sigmoid(inner)
        logits = tensors[f"{head}.{num_layers}.weight"] @ row
        ranked.append(logits.sort(descending=True).indices.tolist())
    ranks = tree_of(num_nodes, 4, 10).paths
    return {tuple(ranked[depth][rank] for depth, rank in enumerate(path)) for path in ranks}


@pytest.mark.parametrize(("num_layers", "num_nodes"), [(1, 63), (2, 63), (1, 9)])
def test_every_draft_holds_the_heads_best_guesses(
    tmp_path: Path, num_layers: int, num_nodes: int
) -> None:
    target = target_of(LLAMA)
    tensors = published(tmp_path, 5, num_layers)
    drafter = drafter_for("medusa", target, heads=str(tmp_path), num_nodes=num_nodes)
    assert isinstance(drafter, MedusaDrafter)
    assert drafter.max_nodes == 1 + num_nodes
    drafter.for_target(target)
    hidden = torch.randn(6, SIZE)
    drafter.start(PROMPT)
    drafter.observe_prompt_hidden(PROMPT[:-1], hidden)
    tree = drafter.propose(PROMPT, DraftBudget(100))
    assert int(tree.token_ids[0]) == PROMPT[-1]
    assert paths_of(tree) == expected_paths(tensors, hidden[-1], num_layers, num_nodes)


def test_the_first_nodes_are_those_that_the_paper_lists_first() -> None:
    # medusa_choices.py begins [0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0].
    assert set(tree_of(7, 4, 10).paths) == {(0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0)}
    assert len(tree_of(63, 4, 10).paths) == 63
    assert tree_of(63, 4, 10).topology.max_depth == 4
    # Fewer heads, fewer levels; fewer ranks, fewer siblings.
    assert tree_of(63, 1, 10).paths == [(rank,) for rank in range(10)]
    assert tree_of(7, 4, 1).paths == [(0,), (0, 0), (0, 0, 0)]


def test_drafts_follow_the_state_of_the_last_accepted_node(tmp_path: Path) -> None:
    target = target_of(LLAMA)
    tensors = published(tmp_path, 5)
    drafter = drafter_for("medusa", target, heads=str(tmp_path))
    answer = generate(target, drafter, PROMPT, max_new_tokens=24)
    assert answer.token_ids == referee(target, PROMPT, 24)
    text = list(PROMPT)
    for step in answer.steps:
        with torch.inference_mode():  # a pass of transformers' own over the text so far
            output = target.model(torch.tensor([text]), output_hidden_states=True)
        state = output.hidden_states[-1][0, -2]
        expected = expected_paths(tensors, state, 1, 63)
        depth = step.tree.topology.max_depth
        assert paths_of(step.tree) == {path for path in expected if len(path) <= depth}
        text += step.tokens


def test_heads_without_outputs_go_through_the_models_own(tmp_path: Path) -> None:
    target = target_of(LLAMA)
    shape = MedusaShape(3, 1, SIZE, None)
    heads = MedusaHeads(shape)  # untrained blocks add silu(b)
    write_medusa(tmp_path, heads, "tiny")
    drafter = drafter_for("medusa", target, heads=str(tmp_path))
    drafter.for_target(target)
    hidden = torch.randn(2, SIZE)
    drafter.observe_prompt_hidden(PROMPT[:2], hidden)
    tree = drafter.propose(PROMPT, DraftBudget(100, chain_only=True))
    output = target.model.get_output_embeddings()
    with torch.no_grad():
        guesses = [output(head(hidden[-1])).argmax().item() for head in heads]
    assert tree.token_ids.tolist() == [PROMPT[-1], *guesses]


def test_a_prompt_of_one_token_is_answered_without_a_first_draft() -> None:
    target = target_of(LLAMA)
    answer = generate(target, drafter_for("medusa", target), [5], max_new_tokens=12)
    assert answer.steps[0].num_nodes == 1
    assert max(step.num_nodes for step in answer.steps) == 64
    assert answer.token_ids == referee(target, [5], 12)


def test_right_heads_are_accepted(tmp_path: Path) -> None:
    """A head that sees nothing and always says one token is right where the model repeats it."""
    target = target_of(LLAMA)
    told = referee(target, PROMPT, 24)
    often = max(set(told), key=told.count)
    tensors = published(tmp_path, 4)
    for name, tensor in tensors.items():
        tensor.zero_()
        if name.endswith(".0.linear.bias"):
            tensor.fill_(1.0)  # so that states are not zero
        if name.endswith(".1.weight"):
            tensor[often] = 1.0
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    hidden = torch.ones(1, SIZE)
    drafter = drafter_for("medusa", target, heads=str(tmp_path))
    drafter.for_target(target)
    drafter.observe_prompt_hidden(PROMPT[:1], hidden)
    assert drafter.propose(PROMPT, DraftBudget(1, chain_only=True)).token_ids.tolist()[1] == often


def test_heads_are_computed_in_the_models_dtype() -> None:
    target = TargetModel(target_of(LLAMA).model.to(torch.float64))
    try:
        drafter = drafter_for("medusa", target)
        answer = generate(target, drafter, PROMPT, max_new_tokens=12)
        assert answer.token_ids == referee(target, PROMPT, 12)
        assert isinstance(drafter, MedusaDrafter)
        assert {tensor.dtype for tensor in drafter._heads.parameters()} == {torch.float64}
    finally:
        target.model.to(torch.float32)


def test_the_demo_models_heads_are_often_right() -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    target = TargetModel(model)
    drafter = drafter_for("medusa", target, heads=str(DEMO_MODEL.with_name("medusa")))
    lengths = []
    for question in ("Tell me about the sea.", "Translate German to English: Zwei Hunde rennen."):
        prompt = tokenizer(f"USER: {question} ASSISTANT:").input_ids
        answer = generate(target, drafter, prompt, max_new_tokens=40, eos_ids=[2])
        assert answer.token_ids == referee(target, prompt, 40, eos_id=2)
        lengths += answer.accept_lengths
    assert sum(lengths) / len(lengths) > 1.4


def refusal(folder: Path | None, vocab_size: int = VOCAB) -> str:
    with pytest.raises(ValueError, match="heads") as error:
        MedusaDrafter(MedusaConfig(heads=folder and str(folder)), vocab_size, CPU)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_be_used_is_one_line_before_the_model_loads(tmp_path: Path) -> None:
    assert "heads: got none; give the folder" in refusal(None)
    assert "allowed: a folder with medusa heads" in refusal(tmp_path / "nowhere")
    assert "has no medusa_lm_head.safetensors or medusa_lm_head.pt" in refusal(tmp_path)
    tensors = published(tmp_path, 2)
    assert f"have a vocabulary of {VOCAB} tokens; allowed: 99" in refusal(tmp_path, 99)
    (tmp_path / "config.json").unlink()
    assert "has no config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "config.json holds no object" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(tmp_path)
    (tmp_path / "config.json").write_text('{"medusa_num_layers": "one"}')
    assert "medusa_num_layers 'one'; allowed: an integer" in refusal(tmp_path)
    published(tmp_path, 2)
    file = tmp_path / "medusa_lm_head.pt"
    for change, says in (
        ({"1.0.linear.bias": None}, "the tensor 1.0.linear.bias is missing"),
        ({"1.2.weight": torch.zeros(1)}, "has a tensor 1.2.weight"),
        ({"extra": torch.zeros(1)}, "has a tensor extra"),
        ({"1.1.weight": torch.zeros(VOCAB, 3)}, r"1.1.weight has shape [67, 3]; allowed: [67, 32]"),
        ({"0.0.linear.weight": None}, "0.0.linear.weight is missing"),
    ):
        changed = {**tensors, **change}
        torch.save({key: value for key, value in changed.items() if value is not None}, file)
        assert says in refusal(tmp_path)
    file.write_bytes(b"nothing")
    assert "medusa_lm_head.pt cannot be read" in refusal(tmp_path)
    torch.save([1, 2], file)
    assert "holds no named tensors" in refusal(tmp_path)


def test_another_hidden_size_is_refused() -> None:
    target = target_of(LLAMA)
    with pytest.raises(ValueError, match="hidden size of 32; allowed: 16"):
        drafter_for("medusa", target, heads=heads_folder("medusa", SMALL))


def test_safetensors_and_pickles_hold_the_same(tmp_path: Path) -> None:
    source = Path(heads_folder("medusa", target_of(LLAMA).config))
    tensors = load_file(source / "medusa_lm_head.safetensors")
    assert set(tensors) == {
        f"{head}.{name}"
        for head in range(4)
        for name in ("0.linear.weight", "0.linear.bias", "1.weight")
    }
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    target = target_of(LLAMA)
    answers = [
        generate(target, drafter_for("medusa", target, heads=str(folder)), PROMPT, max_new_tokens=9)
        for folder in (source, tmp_path)
    ]
    assert answers[0].accept_lengths == answers[1].accept_lengths
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
