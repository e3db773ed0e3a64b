"""The training loop of heads: steps on a frozen model, a log, and a state to go on from."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model.backends.proofs.support import forward_parameters
from model.commands.command_line import UserError
from model.commands.files import replace_file
from model.machine.timing import progress
from scripts.train_heads.data import Document, batches_of_epoch, collate
from scripts.train_heads.heads import HeadTrainer

STATE, LOG = "state.pt", "train_log.jsonl"
LOG_STEPS = 20  # between two lines of the log
WARM_UP = 0.02  # share of the budget in which the learning rate rises


@dataclass(slots=True)
class TrainingPlace:
    """How far training is; saved with the state."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    epoch: int = 0
    batch: int = 0


@dataclass
class Run:
    """A training that can be broken off at any time.

    Raises:
        UserError: if the folder has the state of a training with other settings.
    """

    trainer: HeadTrainer
    model: Any  # frozen
    documents: Sequence[Document]
    # Of the command: minutes of all starts together, the highest learning rate, which falls along a cosine, tokens
    # of a step with its padding, minutes between two saved states, and the seed of the order of the documents.
    options: Any
    work: Path  # folder of state and log
    settings: dict[str, Any]  # must be the same when a training goes on

    def __post_init__(self) -> None:
        self._optimizers = self.trainer.optimizers(self.options.learning_rate)
        self._highest = [one.param_groups[0]["lr"] for one in self._optimizers]
        self.place = TrainingPlace()
        self._recent: list[dict[str, float]] = []
        self._arguments: dict[str, Any] = {"output_hidden_states": True, "use_cache": False}
        if "logits_to_keep" in forward_parameters(self.model):
            self._arguments["logits_to_keep"] = 1  # the model's own logits are not read
        self._batches: list[list[int]] = []  # of the epoch
        self._resume()

    @property
    def share(self) -> float:
        """Share of the budget that is spent."""
        return min(1.0, self.place.seconds / (60 * self.options.minutes))

    def train(self) -> None:
        """Train to the end of the budget."""
        saved = time.monotonic()
        with progress(total=100, unit="%", desc="training") as bar:
            while self.share < 1.0:
                self._step()
                bar.update(int(100 * self.share) - bar.n)
                if time.monotonic() - saved > 60 * self.options.save_minutes:
                    self._save()
                    saved = time.monotonic()
        self._save()

    def _step(self) -> None:
        began, place, options = time.monotonic(), self.place, self.options
        if place.batch == 0 or not self._batches:
            self._batches = batches_of_epoch(
                self.documents, options.batch_tokens, options.seed, place.epoch
            )
        batches = self._batches
        chosen = [self.documents[at] for at in batches[place.batch]]
        batch = collate(chosen, self.model.device)
        with torch.inference_mode():
            output = self.model(batch.token_ids, **self._arguments)
            layers = self.trainer.hidden_layers
            hidden = torch.cat([output.hidden_states[layer] for layer in layers], dim=-1)
        hidden = hidden.clone()  # out of inference mode
        for optimizer, highest in zip(self._optimizers, self._highest, strict=True):
            optimizer.param_groups[0]["lr"] = highest * _schedule(self.share)
        with torch.autocast(hidden.device.type, torch.bfloat16):
            loss = self.trainer.loss(batch, hidden)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(self.trainer.module.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        place.step, place.batch = place.step + 1, place.batch + 1
        place.tokens += int(batch.is_learned.sum())
        if place.batch == len(batches):
            place.epoch, place.batch = place.epoch + 1, 0
        place.seconds += time.monotonic() - began
        self._note({"loss": loss.total.item(), **loss.figures})

    def _note(self, figures: dict[str, float]) -> None:
        self._recent.append(figures)
        if len(self._recent) < LOG_STEPS:
            return
        place, rows = self.place, self._recent
        means = {
            key: round(sum(row[key] for row in rows if key in row) / len(rows), 4)
            for key in rows[-1]
        }
        entry = {"step": place.step, "tokens": place.tokens, "seconds": round(place.seconds, 1)}
        with (self.work / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry | means) + "\n")
        self._recent = []

    def _save(self) -> None:
        place = self.place
        state = {
            "settings": self.settings,
            "module": self.trainer.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "place": {name: getattr(place, name) for name in TrainingPlace.__slots__},
        }
        replace_file(self.work / STATE, lambda file: torch.save(state, file))

    def _resume(self) -> None:
        file = self.work / STATE
        if not file.is_file():
            (self.work / LOG).unlink(missing_ok=True)
            return
        state = torch.load(file, map_location=self.model.device, weights_only=True)
        if changed := [
            name for name, value in self.settings.items() if state["settings"].get(name) != value
        ]:
            raise UserError(
                f"{changed[0]}: got {self.settings[changed[0]]}; the training in {self.work} has "
                f"{state['settings'].get(changed[0])}; give that, or another --out"
            )
        self.trainer.module.load_state_dict(state["module"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.place = TrainingPlace(**state["place"])


def _schedule(share: float) -> float:
    """Return the learning rate's share of the highest, after a share of the budget."""
    if share < WARM_UP:
        return (share + 0.01 * WARM_UP) / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (share - WARM_UP) / (1 - WARM_UP)))
