"""Trainers of heads, one a method: what is learned, its loss, and its checkpoint. Here Medusa's and Hydra's.

Both learn by cross entropy on a frozen model. Medusa-1 (T. Cai et al., arXiv 2401.10774, section 2.2.1): head k
learns the token k + 1 places on, with the weight 0.8 to the power of k (lambda_k). Hydra++ (Z. Ankner et al.,
arXiv 2402.05109): a prefix layer, each head with the true tokens before its own, and the losses of all heads
count alike (zankner/Hydra, hydra/train/train.py).

To add one, write a subclass of `HeadTrainer` and a line in `TRAINERS` of the command.

Shapes: B documents, T tokens, n learned tokens, W hidden states wanted, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional as F

from model.methods.heads.hydra.drafter import HydraHeads, HydraShape, write_hydra
from model.methods.heads.layers import HeadShape
from model.methods.heads.medusa.drafter import MedusaHeads, MedusaShape, write_medusa
from scripts.train_heads.data import Document, TrainingBatch

DECAY = 0.8  # of the weights of Medusa's later heads


class Loss(NamedTuple):
    total: torch.Tensor  # what is minimised, a scalar
    figures: dict[str, float]  # numbers for the log, by name


class HeadTrainer(ABC):
    """Trains the heads of one method on a frozen model.

    Args:
        model: the frozen target model, a transformers causal LM.
        options: of the command, those of `options` among them.
    """

    # Options of the command that this trainer reads beside those of every training, with their defaults.
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    # Hidden states that `loss` gets, as `Needs.hidden_layers`.
    hidden_layers: tuple[int, ...] = (-1,)
    module: nn.Module  # its parameters are learned, and saved for resuming

    @abstractmethod
    def __init__(self, model: Any, options: Any) -> None: ...

    def prepare(self, documents: Sequence[Document]) -> None:  # noqa: B027
        """Look at all that will be learned from, before the first step."""

    def optimizers(self, learning_rate: float) -> list[torch.optim.Optimizer]:
        """Return the optimizers of the module's parameters, each with one group of them and its highest rate."""
        parameters = self.module.parameters()
        return [
            torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
        ]

    @abstractmethod
    def loss(self, batch: TrainingBatch, hidden: torch.Tensor) -> Loss:
        """Return the loss of a batch whose tokens have these hidden states [B, T, W * D]."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the checkpoint in its published form, in float16."""


class _HeadsTrainer(HeadTrainer):
    """Base of both; without output layers of their own the heads go through the model's."""

    options = MappingProxyType({"num_heads": 4, "num_layers": 1, "own_outputs": True})

    def __init__(self, model: Any, options: Any) -> None:
        self._output = model.get_output_embeddings().weight
        self._num_heads, self._num_layers = options.num_heads, options.num_layers
        self._own_vocab = self._output.shape[0] if options.own_outputs else None
        self._name = options.model_path

    def _loss(
        self,
        batch: TrainingBatch,
        logits_of: Callable[[int, torch.Tensor], torch.Tensor],
        decay: float,
    ) -> Loss:
        """Return the weighted sum of the heads' cross entropies.

        Args:
            batch: the texts.
            logits_of: the logits [n, V] of a head at the places chosen [B, T - 2 - head]; head 0 guesses two places
                on, for the model's own guesses one.
            decay: weight of a head relative to the one before.
        """
        total, figures = torch.zeros(()), {}
        for index in range(self._num_heads):
            chosen = batch.is_learned[:, 2 + index :]
            if not chosen.any():
                continue
            logits = logits_of(index, chosen)
            wanted = batch.token_ids[:, 2 + index :][chosen]
            loss = F.cross_entropy(logits.float(), wanted)
            total = total + decay ** (1 + index) * loss
            figures[f"loss_{1 + index}"] = loss.item()
            figures[f"top1_{1 + index}"] = (logits.argmax(-1) == wanted).float().mean().item()
        return Loss(total, figures)


class MedusaTrainer(_HeadsTrainer):
    module: MedusaHeads

    def __init__(self, model: Any, options: Any) -> None:
        super().__init__(model, options)
        size = self._output.shape[1]
        shape = MedusaShape(self._num_heads, self._num_layers, size, self._own_vocab)
        self.module = MedusaHeads(shape)
        self._heads = cast("list[nn.Sequential]", list(self.module))
        if self._own_vocab:
            for head in self._heads:
                cast(nn.Linear, head[-1]).weight.data.copy_(self._output)

    def loss(self, batch: TrainingBatch, hidden: torch.Tensor) -> Loss:
        def logits_of(index: int, chosen: torch.Tensor) -> torch.Tensor:
            states = self._heads[index](hidden[:, : -(2 + index)][chosen])  # [n, D], or [n, V]
            return states if self._own_vocab else F.linear(states, self._output)

        return self._loss(batch, logits_of, DECAY)

    def save(self, folder: Path) -> None:
        write_medusa(folder, copy.deepcopy(self.module).half(), self._name)


class HydraTrainer(_HeadsTrainer):
    module: HydraHeads

    def __init__(self, model: Any, options: Any) -> None:
        super().__init__(model, options)
        self._embed = model.get_input_embeddings()
        layer = HeadShape.of_config(model.config.get_text_config(decoder=True))
        shape = HydraShape(self._num_heads, self._num_layers, self._own_vocab)
        self.module = HydraHeads(shape, layer)
        for head in self.module.hydra_mlp:
            # Training begins at the prefix state itself.
            skipped = cast(nn.Linear, head[1].res_connection)  # type: ignore[index]
            nn.init.zeros_(skipped.weight)
            nn.init.zeros_(skipped.bias)
            nn.init.eye_(skipped.weight.data[:, : layer.hidden_size])
        if self._own_vocab:
            for output in self.module.hydra_lm_head:
                linear = cast(nn.Linear, output[1])  # type: ignore[index]
                linear.weight.data.copy_(self._output)
                nn.init.zeros_(linear.bias)

    def loss(self, batch: TrainingBatch, hidden: torch.Tensor) -> Loss:
        prefix = self.module.prefix_embeding_layer(hidden)  # [B, T, D]
        embedded = self._embed(batch.token_ids)  # [B, T, D]
        length = batch.token_ids.shape[1]

        def logits_of(index: int, chosen: torch.Tensor) -> torch.Tensor:
            ahead = 2 + index
            parts = [prefix[:, :-ahead][chosen]]
            for known in range(1, ahead):
                parts.append(embedded[:, known : length - ahead + known][chosen])
            states = self.module.states(index, torch.cat(parts, dim=-1))  # [n, D]
            if self._own_vocab:
                return self.module.logits(index, states)
            return F.linear(states, self._output)

        return self._loss(batch, logits_of, decay=1.0)

    def save(self, folder: Path) -> None:
        write_hydra(folder, copy.deepcopy(self.module).half(), self._name)
