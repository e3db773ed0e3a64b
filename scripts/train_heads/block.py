"""Training DFlash's and DSpark's block drafter on the hidden states of a frozen model.

Blocks begin after many tokens of every text at once. Each guess learns the model's probabilities of its place, the
first ones most: weight exp(-i / 4) of guess i (the authors' `loss_decay_gamma`); with a Markov head, given the true
token before it.

Sources: DFlash, arXiv 2602.06036; github.com/deepseek-ai/DeepSpec at afdfa7c (`deepspec/modeling/dspark`).

Shapes: B texts, T tokens, A blocks of a text, b rows of a block, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional as F

from model.methods.heads.block.network import BlockNetwork, BlockShape, write_block
from model.methods.heads.layers import HeadShape, Projected, attend_rows
from scripts.train_heads.data import TrainingBatch
from scripts.train_heads.eagle import NetworkTrainer
from scripts.train_heads.heads import Loss

GAMMA = 4.0
BLOCK, RANK = 6, 32
# Blocks of a text in a step.
NUM_BLOCKS = 64


class BlockTrainer(NetworkTrainer):
    """Trains a block drafter with a Markov head; its output head is the model's."""

    options = MappingProxyType({"num_layers": 2})
    module: BlockNetwork

    def __init__(self, model: Any, options: Any) -> None:
        config = model.config.get_text_config(decoder=True)
        count = config.num_hidden_layers
        outputs = tuple(sorted({0, count // 2, max(0, count - 2)}))
        vocab_size = model.get_output_embeddings().weight.shape[0]
        shape = BlockShape(
            **asdict(HeadShape.of_config(config)),
            num_layers=options.num_layers,
            vocab_size=vocab_size,
            draft_vocab_size=vocab_size,
            block_size=BLOCK,
            mask_token=config.pad_token_id or 0,
            outputs_of=outputs,
            guesses_at_root=True,
            has_head=False,
            markov_rank=RANK,
        )
        super().__init__(BlockNetwork(shape), model)
        self.hidden_layers = (*(output + 1 for output in outputs), -1)

    def loss(self, batch: TrainingBatch, hidden: torch.Tensor) -> Loss:
        """Return the loss of blocks after tokens that are the same in all texts.

        Args:
            batch: the texts.
            hidden: joined states, and the final ones, [B, T, W * D].
        """
        network, size, device = self.module, self.module.shape.hidden_size, hidden.device
        joined, final = hidden[..., :-size], hidden[..., -size:]
        length = joined.shape[1]
        count = min(NUM_BLOCKS, length - 2)
        roots = 1 + torch.randperm(length - 2, device=device)[:count].sort().values  # [A]
        places = roots[:, None] + torch.arange(BLOCK, device=device)  # [A, b]
        context = network.read(joined, torch.arange(length, device=device))
        token_ids = batch.token_ids
        inputs = torch.full((len(token_ids), count, BLOCK), network.shape.mask_token, device=device)
        inputs[:, :, 0] = token_ids[:, roots]
        mask = block_mask(roots, length)
        attends = [partial(beside, rows, mask=mask) for rows in context]
        states = network(self._embedding(inputs.flatten(1)), places.flatten(), attends)
        aims = places.clamp(max=length - 2)  # the final states that say what is guessed
        is_learned = batch.is_learned[:, aims + 1] & (places <= length - 2)  # [B, A, b]
        states = states.unflatten(1, (count, BLOCK))[is_learned]
        bias = network.markov_head.markov_w2(
            network.markov_head.markov_w1(token_ids[:, aims][is_learned])
        )
        found = (self._head(states) + bias).float()
        wanted = self._head(final[:, aims][is_learned]).float()
        missed = F.cross_entropy(found, wanted.softmax(-1), reduction="none")
        step = torch.arange(BLOCK, device=device).expand(is_learned.shape)[is_learned]
        weights = torch.exp(-step / GAMMA)
        right = (found.argmax(-1) == wanted.argmax(-1)).float()
        figures = {
            f"top1_{1 + place}": right[step == place].mean().item()
            for place in range(BLOCK)
            if bool((step == place).any())
        }
        return Loss((missed * weights).sum() / weights.sum().clamp(min=1e-6), figures)

    def save(self, folder: Path) -> None:
        write_block(folder, self.module)


def block_mask(roots: torch.Tensor, length: int) -> torch.Tensor:
    """Return which rows of a text, and of all its blocks, a block's row sees, bool [A * b, T + A * b]."""
    block = torch.arange(len(roots), device=roots.device).repeat_interleave(BLOCK)
    before = torch.arange(length, device=roots.device) < roots[block, None]
    return torch.cat((before, block[:, None] == block), dim=1)


def beside(context: Projected, projected: Projected, mask: torch.Tensor) -> torch.Tensor:
    """Return the attention of blocks' rows to a text's and their own."""
    keys = torch.cat((context.keys, projected.keys), dim=-2)
    values = torch.cat((context.values, projected.values), dim=-2)
    return attend_rows(Projected(projected.queries, keys, values), mask)
