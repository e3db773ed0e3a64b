"""Trainers of EAGLE's networks and of block drafters: what is trained is what drafts, and it is learned.

Run: pytest tests/scripts/train_heads/test_train_eagle.py
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from model.backends.target import TargetModel
from model.engine.loop import generate
from model.methods import drafter_class
from model.methods.heads.block.drafter import BlockText
from model.methods.heads.eagle.network import Eagle3Network, NetworkShape
from model.methods.heads.eagle.trees import DraftText
from scripts.train_heads.block import BLOCK, BlockTrainer, beside, block_mask
from scripts.train_heads.data import Document, collate
from scripts.train_heads.eagle import DraftedRows, Eagle3Trainer, EagleTrainer, own_vocabulary
from scripts.train_heads.heads import HeadTrainer
from tests.model.decoded import random_ids, referee, target_of

LLAMA = "Llama, grouped heads"
VOCAB, SIZE = 40, 32
SHAPE = NetworkShape(SIZE, 48, 4, 2, 8, vocab_size=VOCAB, draft_vocab_size=VOCAB)
CPU = torch.device("cpu")


@torch.inference_mode()
def test_drafts_in_training_are_those_of_drafting() -> None:
    """Drafts that begin after every token at once have the states of drafts that begin after one."""
    torch.manual_seed(0)
    network = Eagle3Network(SHAPE).double()
    embedding, head = nn.Embedding(VOCAB, SIZE).double(), nn.Linear(SIZE, VOCAB).double()
    tokens, hidden = torch.randint(VOCAB, (13,)), torch.randn(9, 3 * SIZE).double()
    features, rows, logits = network.fused(hidden)[None], DraftedRows(), []
    for step in range(3):
        read = embedding(tokens[None, 1 + step : 10 + step])
        features = network(read, features, torch.arange(9) + step, rows.attend)
        logits.append(network.logits(features, head)[0])
    for place in range(9):
        text = DraftText(network, embedding, head, CPU)
        text.read(tokens[1 : 2 + place].tolist(), hidden[: 1 + place])
        draft = text.draft()
        assert draft is not None
        for step in range(3):
            assert (draft.logits[0] - logits[step][place]).abs().max() < 1e-6
            draft.deepen(torch.tensor([0]), tokens[2 + place + step, None])


def test_the_own_vocabulary_is_the_most_frequent_tokens() -> None:
    tables = own_vocabulary(torch.tensor([0, 5, 2, 9, 0, 3]), 3)
    assert tables["t2d"].tolist() == [False, True, False, True, False, True]
    assert (torch.arange(3) + tables["d2t"]).tolist() == [1, 3, 5]


@torch.inference_mode()
def test_blocks_in_training_are_those_of_drafting() -> None:
    """Blocks after several tokens at once have the guesses of blocks that are drafted after one."""
    target = target_of(LLAMA)
    torch.manual_seed(0)
    trainer = BlockTrainer(target.model, Namespace(num_layers=2))
    network = trainer.module
    tokens, hidden = random_ids(14), torch.randn(14, 2 * SIZE)
    roots = torch.tensor([3, 7, 11])
    places = roots[:, None] + torch.arange(BLOCK)
    inputs = torch.full((3, BLOCK), network.shape.mask_token)
    inputs[:, 0] = torch.tensor(tokens)[roots]
    context = network.read(hidden[None], torch.arange(14))
    attends = [partial(beside, rows, mask=block_mask(roots, 14)) for rows in context]
    embedding = target.model.get_input_embeddings()
    found = network(embedding(inputs.flatten()[None]), places.flatten(), attends)
    found = found[0].unflatten(0, (3, BLOCK))
    for index, root in enumerate(roots.tolist()):
        text = BlockText(network, target)
        text.read(tokens[1 : root + 1], hidden[:root])
        block = text.block(tokens[root], 1)
        assert block is not None
        logits = target.model.get_output_embeddings()(found[index])
        before = [tokens[root], *block.tokens[:-1]]
        biases = torch.cat([network.bias(torch.tensor([token])) for token in before])
        assert (logits + biases).argmax(-1).tolist() == block.tokens


@pytest.mark.parametrize("method", ["eagle", "eagle2", "eagle3", "dflash"])
def test_a_trained_network_is_right_more_often(method: str, tmp_path: Path) -> None:
    """It learns a random model's answers by heart; the checkpoint is one that the drafter reads."""
    torch.manual_seed(0)
    target = target_of(LLAMA)
    model = target.model.requires_grad_(False)
    prompts = [random_ids(8, seed=seed) for seed in range(3)]
    answers = [referee(target, prompt, 24) for prompt in prompts]
    documents = [
        Document([*prompt, *answer], 8) for prompt, answer in zip(prompts, answers, strict=True)
    ]
    trainers = {"eagle3": Eagle3Trainer, "dflash": BlockTrainer}
    trainer = trainers.get(method, EagleTrainer)(model, Namespace(draft_vocab=50, num_layers=1))
    trainer.prepare(documents)
    before = mean_length(trainer, method, tmp_path / "before", target, prompts)
    optimizer = torch.optim.AdamW(trainer.module.parameters(), lr=1e-2)
    batch = collate(documents, CPU)
    with torch.no_grad():
        output = model(batch.token_ids, output_hidden_states=True, use_cache=False)
    hidden = torch.cat([output.hidden_states[layer] for layer in trainer.hidden_layers], dim=-1)
    losses = []
    for _ in range(60):
        loss = trainer.loss(batch, hidden).total
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.6 * losses[0]
    after = mean_length(trainer, method, tmp_path / "after", target, prompts)
    assert after > 1.3 * before


def mean_length(
    trainer: HeadTrainer, method: str, folder: Path, target: TargetModel, prompts: list[list[int]]
) -> float:
    """Mean accepted tokens a step with a trainer's checkpoint."""
    folder.mkdir()
    trainer.save(folder)
    cls = drafter_class(method)
    options = {} if method == "dflash" else {"num_nodes": 8}
    drafter = cls(cls.config_class(heads=str(folder), **options), target.vocab_size, CPU)
    drafter.check_target(target)
    lengths = [
        length
        for prompt in prompts
        for length in generate(target, drafter, prompt, max_new_tokens=24).accept_lengths
    ]
    return sum(lengths) / len(lengths)
