"""Training core of the demo model: batches, loss, steps, checkpoints.

One optimizer step, the held-out loss and the saved state; the main phase and the phase against loops
share them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from model.commands.files import write_whole
from model.machine.files import atomic_write
from scripts.demo_model.corpus import CorpusConfig, Packed, Split, Turn, pack_epoch
from scripts.demo_model.recipe import TrainConfig, build_model, build_optimizers

CHECKPOINT, LOG = "checkpoint.pt", "train_log.jsonl"


@dataclass(slots=True)
class Progress:
    """The progress of training; saved with each checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    epoch: int = 0
    batch: int = 0  # next batch of the epoch
    rounds: int = 0  # rounds of the phase against loops


class Batch(NamedTuple):
    """One step's data; B sequences, T tokens each."""

    token_ids: Tensor  # [B, T] int64
    weights: Tensor  # [B, T] float32


class Forward(NamedTuple):
    """The losses of a batch."""

    losses: Tensor  # [B, T] float32 nats
    weights: Tensor  # [B, T] float32, of the token each position predicts

    def mean(self) -> Tensor:
        """Weighted mean loss, a scalar."""
        return (self.losses * self.weights).sum() / self.weights.sum()


class HeldOutLoss(NamedTuple):
    """Mean loss in nats per token."""

    response: float
    all_tokens: float


def token_losses(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """Cross-entropy of every next token.

    Args:
        model: The model.
        token_ids: [B, T] int64.

    Returns:
        [B, T] float32 nats; column t is about token t + 1, and the last column means nothing.
    """
    with torch.autocast(token_ids.device.type, dtype=torch.bfloat16):
        hidden = model.model(token_ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)
    targets = token_ids.roll(-1, dims=1)
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(token_ids)


def next_weights(weights: Tensor) -> Tensor:
    """Shift token weights [B, T] to the positions that predict them; the last column is 0."""
    shifted = weights.roll(-1, dims=1)
    shifted[:, -1] = 0.0
    return shifted


def batches(packed: Packed, tokens_per_step: int, pad: int) -> list[Batch]:
    """Cut packed sequences into batches of one shape; the last one is filled with padding."""
    num, length = packed.token_ids.shape
    size = max(1, tokens_per_step // length)
    result = []
    for start in range(0, num, size):
        token_ids = np.full((size, length), pad, dtype=np.int64)
        weights = np.zeros((size, length), dtype=np.float32)
        count = min(size, num - start)
        token_ids[:count] = packed.token_ids[start : start + count]
        weights[:count] = packed.weights[start : start + count]
        result.append(Batch(torch.from_numpy(token_ids), torch.from_numpy(weights)))
    return result


class Trainer:
    """Model, optimizers, data and saved state of one run."""

    def __init__(
        self,
        config: TrainConfig,
        corpus: CorpusConfig,
        tokenizer: PreTrainedTokenizerFast,
        turns: Split[Turn],
        work: Path,
        device: torch.device,
        use_compile: bool,
    ) -> None:
        """Build model and optimizers and go to the last checkpoint of ``work``, if any.

        Args:
            config: Shape and recipe.
            corpus: How rows become sequences.
            tokenizer: The trained tokenizer.
            turns: Training and held-out turns.
            work: Folder of checkpoint and log.
            device: Where to train.
            use_compile: Whether to compile the loss (needs a C++ compiler on a CPU).
        """
        self.config, self.corpus, self.tokenizer, self.work = config, corpus, tokenizer, work
        self.device = device
        self.turns = turns
        self.model = build_model(config, tokenizer).to(device)
        self.optimizers = build_optimizers(self.model, config)
        self.progress = Progress()
        self.losses: Callable[[PreTrainedModel, Tensor], Tensor] = token_losses
        if use_compile:
            self.losses = torch.compile(token_losses, dynamic=False)
        plain = replace(corpus, two_turn_share=0.0, system_share=0.0, long_share=0.0)
        self.held_out = self._batches(turns.held_out, plain, seed=0)
        self._resume()

    def _batches(self, turns: list[Turn], corpus: CorpusConfig, seed: int) -> list[Batch]:
        """Pack one pass over the turns, in a fixed shuffled order."""
        result = [
            batch
            for packed in pack_epoch(turns, self.tokenizer, corpus, seed)
            for batch in batches(packed, self.config.tokens_per_step, self.tokenizer.pad_token_id)
        ]
        order = np.random.default_rng(seed).permutation(len(result))
        return [result[index] for index in order]

    @property
    def share(self) -> float:
        """Share of the budget that is spent."""
        return self.config.progress(self.progress.seconds, self.progress.tokens)

    def _resume(self) -> None:
        path = self.work / CHECKPOINT
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        log = self.work / LOG
        if log.exists():
            lines = [
                line
                for line in log.read_text().splitlines()
                if json.loads(line)["step"] <= self.progress.step
            ]
            write_whole(log, "".join(line + "\n" for line in lines))

    def save(self) -> None:
        """Write the checkpoint."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": asdict(self.progress),
        }
        path = self.work / CHECKPOINT
        with atomic_write(path) as temporary:
            torch.save(state, temporary)

    def stream(self) -> Iterator[Batch]:
        """Training batches without end, from where the last checkpoint stopped."""
        while True:
            seed = self.config.seed + 1000 * self.progress.epoch
            epoch = self._batches(self.turns.train, self.corpus, seed)
            while self.progress.batch < len(epoch):
                batch = epoch[self.progress.batch]
                self.progress.batch += 1
                yield batch
            self.progress.epoch += 1
            self.progress.batch = 0

    def forward(self, batch: Batch) -> Forward:
        """Losses of a batch, with the weights moved to the predicting positions."""
        token_ids = batch.token_ids.to(self.device)
        weights = next_weights(batch.weights.to(self.device))
        # A recurrence is unrolled: over a long sequence it would compile for longer than it trains.
        is_unrolled = self.config.is_recurrent and token_ids.shape[1] > self.corpus.short_length
        losses = token_losses if is_unrolled else self.losses
        return Forward(losses(self.model, token_ids), weights)

    def step(self, batch: Batch) -> dict[str, float]:
        """One step of the main phase; returns the figures of the log."""
        started = time.perf_counter()
        result = self.forward(batch)
        loss = result.mean()
        loss.backward()
        factor = self.config.lr_factor(self.progress.step, self.share)
        self.optimizers.step(self.config.muon_lr * factor, self.config.adam_lr * factor)
        self.progress.step += 1
        self.progress.tokens += batch.token_ids.numel()
        losses = result.losses.detach()
        figures = {
            "loss": loss.item(),
            "all_tokens": losses[result.weights > 0].mean().item(),
            "response": losses[result.weights >= 1].mean().item(),
            "lr_factor": factor,
        }
        self.progress.seconds += time.perf_counter() - started
        return figures

    @torch.no_grad()
    def evaluate(self) -> HeldOutLoss:
        """Held-out loss."""
        sums = torch.zeros(4, dtype=torch.float64)
        for batch in self.held_out:
            result = self.forward(batch)
            losses, weights = result.losses.cpu(), result.weights.cpu()
            for offset, mask in ((0, weights >= 1), (2, weights > 0)):
                sums[offset] += losses[mask].sum()
                sums[offset + 1] += mask.sum()
        response, num_response, everything, num_all = sums.tolist()
        return HeldOutLoss(response / num_response, everything / num_all)


def append_line(path: Path, item: Mapping[str, object]) -> None:
    """Append one JSON line."""
    with path.open("a", encoding="utf-8") as log:
        log.write(json.dumps(dict(item)) + "\n")
