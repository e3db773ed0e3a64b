"""Training Hydra's heads: cross entropy on a frozen model, each head with the true tokens before its own.

Source: Z. Ankner et al., Hydra, arXiv 2402.05109: Hydra++'s prefix layer and heads; the losses of all
heads count alike (zankner/Hydra, hydra/train/train.py).

Shapes: B documents, T tokens, n learned tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from model.methods.heads.hydra.drafter import HydraHeads, HydraShape, write_hydra
from model.methods.heads.layers import LayerShape
from scripts.train_heads.data import Batch
from scripts.train_heads.trainers import HEADS_OPTIONS, HeadTrainer, Loss, loss_of_heads


class HydraTrainer(HeadTrainer):
    """Trains prefix layer and heads; without output layers of their own they go through the model's."""

    options = HEADS_OPTIONS
    module: HydraHeads

    def __init__(self, model: Any, options: Any) -> None:
        self._output = model.get_output_embeddings().weight
        self._embed = model.get_input_embeddings()
        own = self._output.shape[0] if options.own_outputs else None
        shape = HydraShape(options.num_heads, options.num_layers, own)
        layer = LayerShape.of_config(model.config.get_text_config(decoder=True))
        self.module = HydraHeads(shape, layer)
        for head in self.module.hydra_mlp:
            # Training begins at the prefix state itself.
            skipped = cast(nn.Linear, head[1].res_connection)  # type: ignore[index]
            nn.init.zeros_(skipped.weight)
            nn.init.zeros_(skipped.bias)
            nn.init.eye_(skipped.weight.data[:, : layer.hidden_size])
        if own is not None:
            for output in self.module.hydra_lm_head:
                linear = cast(nn.Linear, output[1])  # type: ignore[index]
                linear.weight.data.copy_(self._output)
                nn.init.zeros_(linear.bias)
        self._name = options.model_path

    def loss(self, batch: Batch, hidden: torch.Tensor) -> Loss:
        """Return the sum of the heads' cross entropies."""
        prefix = self.module.prefix_embeding_layer(hidden)  # [B, T, D]
        embedded = self._embed(batch.token_ids)  # [B, T, D]
        length = batch.token_ids.shape[1]

        def logits_of(index: int, chosen: torch.Tensor) -> torch.Tensor:
            ahead = 2 + index
            parts = [prefix[:, :-ahead][chosen]]
            for known in range(1, ahead):
                parts.append(embedded[:, known : length - ahead + known][chosen])
            states = self.module.states(index, torch.cat(parts, dim=-1))  # [n, D]
            if self.module.shape.vocab_size is None:
                return F.linear(states, self._output)
            return self.module.logits(index, states)

        return loss_of_heads(batch, logits_of, self.module.shape.num_heads)

    def save(self, folder: Path) -> None:
        """Write the checkpoint in float16."""
        write_hydra(folder, copy.deepcopy(self.module).half(), self._name)
