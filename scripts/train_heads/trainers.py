"""Trainers of heads, one a method: what is learned, its loss, and its checkpoint.

To add one, write a module with a subclass of `HeadTrainer` and a line here.

Shapes: B documents, T tokens, W hidden states wanted, D hidden size.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from model.options import unknown_name
from scripts.train_heads.data import Batch, Document

# Module and class of each method's trainer.
TRAINERS = {
    "medusa": "scripts.train_heads.medusa:MedusaTrainer",
    "hydra": "scripts.train_heads.hydra:HydraTrainer",
    "eagle": "scripts.train_heads.eagle:EagleTrainer",
    "eagle3": "scripts.train_heads.eagle:Eagle3Trainer",
}


class Loss(NamedTuple):
    """The loss of a batch."""

    total: torch.Tensor  # what is minimised, a scalar
    figures: dict[str, float]  # numbers for the log, by name


class HeadTrainer(ABC):
    """Trains the heads of one method on a frozen model.

    Args:
        model: the frozen target model, a transformers causal LM.
        options: of the command, those of `options` among them.
    """

    # Options of the command that this trainer reads beside those of every training, with their defaults.
    options: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"num_heads": 4, "num_layers": 1, "own_outputs": True}
    )
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


def trainer_class(method: str) -> type[HeadTrainer]:
    """Return the trainer of a method.

    Raises:
        ValueError: if it has none; names those that have.
    """
    if method not in TRAINERS:
        raise ValueError(unknown_name("method", method, list(TRAINERS)))
    module, name = TRAINERS[method].split(":")
    found: type[HeadTrainer] = getattr(importlib.import_module(module), name)
    return found
