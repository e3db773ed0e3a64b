"""Trainers of heads, one a method: what is learned, its loss, and its checkpoint.

To add one, write a module with a subclass of `HeadTrainer` and a line in `TRAINERS` of the command.

Shapes: B documents, T tokens, n learned tokens, W hidden states wanted, D hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from scripts.train_heads.data import Batch, Document

# Options of trainers whose heads guess one place each, with their defaults.
HEADS_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"num_heads": 4, "num_layers": 1, "own_outputs": True}
)


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
    def loss(self, batch: Batch, hidden: torch.Tensor) -> Loss:
        """Return the loss of a batch whose tokens have these hidden states [B, T, W * D]."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the checkpoint in its published form, in float16."""


def loss_of_heads(
    batch: Batch,
    logits_of: Callable[[int, torch.Tensor], torch.Tensor],
    num_heads: int,
    decay: float = 1.0,
) -> Loss:
    """Return the weighted sum of the cross entropies of heads that guess one place each.

    Args:
        batch: the texts.
        logits_of: the logits [n, V] of a head at the places chosen [B, T - 2 - head].
        num_heads: how many there are; head 0 guesses two places on, for the model's own guesses one.
        decay: weight of a head relative to the one before.
    """
    total, figures = torch.zeros(()), {}
    for index in range(num_heads):
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
