"""Training Medusa's heads: Medusa-1, cross entropy on a frozen model.

Source: T. Cai et al., Medusa, arXiv 2401.10774, section 2.2.1: head k learns the token k + 1 places
on, with the weight 0.8 to the power of k (lambda_k).

Shapes: B documents, T tokens, n learned tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from model.methods.heads.medusa.drafter import MedusaHeads, MedusaShape, write_medusa
from scripts.train_heads.data import Batch
from scripts.train_heads.trainers import HEADS_OPTIONS, HeadTrainer, Loss, loss_of_heads

DECAY = 0.8  # of the weights of later heads


class MedusaTrainer(HeadTrainer):
    """Trains the heads; without output layers of their own they go through the model's."""

    options = HEADS_OPTIONS
    module: MedusaHeads

    def __init__(self, model: Any, options: Any) -> None:
        output = model.get_output_embeddings().weight
        vocab_size, size = output.shape
        self._output = output
        own = vocab_size if options.own_outputs else None
        self._shape = MedusaShape(options.num_heads, options.num_layers, size, own)
        self.module = MedusaHeads(self._shape)
        self.heads = cast("list[nn.Sequential]", list(self.module))
        if own is not None:
            for head in self.heads:
                cast(nn.Linear, head[-1]).weight.data.copy_(output)
        self._name = options.model_path

    def loss(self, batch: Batch, hidden: torch.Tensor) -> Loss:
        """Return the weighted sum of the heads' cross entropies."""

        def logits_of(index: int, chosen: torch.Tensor) -> torch.Tensor:
            states = self.heads[index](hidden[:, : -(2 + index)][chosen])  # [n, D], or [n, V]
            return states if self._shape.vocab_size else F.linear(states, self._output)

        return loss_of_heads(batch, logits_of, len(self.heads), DECAY)

    def save(self, folder: Path) -> None:
        """Write the checkpoint in float16."""
        write_medusa(folder, copy.deepcopy(self.module).half(), self._name)
