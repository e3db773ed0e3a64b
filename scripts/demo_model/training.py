"""Main phase of the demo model: shape, optimizers, batches, steps.

Muon for the matrices and AdamW for the rest, bf16 autocast, chats packed whole, prompt tokens
weighted below answer tokens and the end of an answer above them; learning rate constant, then
falling as one minus a square root.

Shapes: B sequences, T tokens each.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from evaluation.answers.progress import progress
from scripts.demo_model.corpus import CorpusConfig, Turn, pack_epoch

CONTEXT = 3072  # the longest Spec-Bench prompt is 1,900 tokens; 1,024 new ones still fit
CORPUS = CorpusConfig(long_length=CONTEXT)
LOG_STEPS, EVAL_STEPS = 20, 200  # between two lines of the log, and two held-out losses
MUON_LR, ADAM_LR = 0.02, 2e-3
WARMUP_STEPS = 60
DECAY_SHARE = 0.4  # last share of the tokens, in which the learning rate falls to zero
TOKENS_PER_STEP = 4608


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Shape of the model, and how long it is trained; the defaults are the demo model's."""

    vocab_size: int = 8192
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    intermediate: int = 704
    tokens: int = 25_000_000  # of the main phase, padding included
    seed: int = 0
    is_recurrent: bool = False  # three of four layers have a state (gated delta rule, Qwen3.5)


def lr_factor(step: int, share: float) -> float:
    """Return the learning rate's share of the highest, after this share of the tokens.

    At this batch size the constant phase ends in a plateau of noise; the square root leaves it sooner
    than a straight line does (Hägele et al. 2024, arXiv 2405.18392).
    """
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    decayed = max(0.0, share - (1.0 - DECAY_SHARE)) / DECAY_SHARE
    return max(0.0, min(warmup, 1.0 - decayed**0.5))


def build_model(config: TrainConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return the untrained model, float32, on the CPU."""
    shape = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "intermediate_size": config.intermediate,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    found = LlamaConfig(**shape)
    if config.is_recurrent:
        head_dim = config.hidden // config.heads
        layers = range(1, config.layers + 1)
        found = transformers.Qwen3_5TextConfig(
            **shape,
            head_dim=head_dim,
            layer_types=["linear_attention" if layer % 4 else "full_attention" for layer in layers],
            linear_num_key_heads=config.heads,
            linear_num_value_heads=config.heads,
            linear_key_head_dim=head_dim,
            linear_value_head_dim=head_dim,
        )
    torch.manual_seed(config.seed)
    return AutoModelForCausalLM.from_config(found, dtype=torch.float32)


def optimizers_of(model: PreTrainedModel) -> dict[float, torch.optim.Optimizer]:
    """Return, by highest learning rate, Muon for the matrices inside layers and AdamW for the rest."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed_tokens" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed_tokens" in name]
    return {
        MUON_LR: torch.optim.Muon(matrices, lr=MUON_LR, momentum=0.95),
        ADAM_LR: torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0),
    }


class Batch(NamedTuple):
    """One step's data."""

    token_ids: Tensor  # [B, T] int64
    weights: Tensor  # [B, T] float32


def token_losses(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """Return the cross-entropy of every next token, float32 nats [B, T]; the last column means nothing."""
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


class Trainer:
    """Model, optimizers and data of one training.

    Args:
        config: shape and number of tokens.
        tokenizer: the tokenizer.
        turns: to learn from.
        held_out: never learned from.
        log: JSON lines of figures are appended to it.
        device: where to train.
        use_compile: whether to compile the loss (needs a C++ compiler on a CPU).
    """

    def __init__(
        self,
        config: TrainConfig,
        tokenizer: PreTrainedTokenizerFast,
        turns: Sequence[Turn],
        held_out: Sequence[Turn],
        log: Path,
        device: torch.device,
        use_compile: bool,
    ) -> None:
        self.config, self.tokenizer, self.turns = config, tokenizer, turns
        self.device = device
        self.model = build_model(config, tokenizer).to(device)
        self._optimizers = optimizers_of(self.model)
        self.stream = self._stream()
        self.step = 0
        self._losses: Callable[[PreTrainedModel, Tensor], Tensor] = token_losses
        if use_compile:
            self._losses = torch.compile(token_losses, dynamic=False)
        self._log, self._started = log, time.perf_counter()
        plain = replace(CORPUS, two_turn_share=0.0, system_share=0.0, long_share=0.0)
        self._held_out = self._batches(held_out, plain, seed=0)

    def train(self) -> None:
        """Run the main phase to the end of its tokens."""
        losses: list[float] = []
        tokens = 0
        with progress(total=self.config.tokens, unit="token", desc="training") as bar:
            while tokens < self.config.tokens:
                batch = next(self.stream)
                factor = lr_factor(self.step, tokens / self.config.tokens)
                loss = self.loss(batch)
                loss.backward()
                self.apply(factor)
                losses.append(loss.item())
                tokens += batch.token_ids.numel()
                is_done = tokens >= self.config.tokens
                if self.step % LOG_STEPS == 0 or is_done:
                    figures = {"tokens": tokens, "loss": fmean(losses), "lr_factor": factor}
                    if self.step % EVAL_STEPS == 0 or is_done:
                        figures |= self._evaluate()
                    self.note(figures)
                    losses = []
                bar.update(batch.token_ids.numel())

    def _stream(self) -> Iterator[Batch]:
        """Yield training batches without end."""
        for epoch in count():
            yield from self._batches(self.turns, CORPUS, self.config.seed + 1000 * epoch)

    def _batches(self, turns: Sequence[Turn], corpus: CorpusConfig, seed: int) -> list[Batch]:
        """Pack one pass over the turns into batches of two shapes, in a fixed shuffled order."""
        result = []
        for ids, weights in pack_epoch(turns, self.tokenizer, corpus, seed):
            if not len(ids):
                continue
            size = max(1, TOKENS_PER_STEP // ids.shape[1])
            missing = ((0, -len(ids) % size), (0, 0))  # the last batch is filled with padding
            ids = np.pad(ids, missing, constant_values=self.tokenizer.pad_token_id)
            parts = (torch.from_numpy(each).split(size) for each in (ids, np.pad(weights, missing)))
            result += [Batch(*pair) for pair in zip(*parts, strict=True)]
        order = np.random.default_rng(seed).permutation(len(result))
        return [result[index] for index in order]

    def losses(self, token_ids: Tensor) -> Tensor:
        """Return the losses of every next token, float32 nats [B, T]."""
        # A recurrence is unrolled: over a long sequence it would compile for longer than it trains.
        is_unrolled = self.config.is_recurrent and token_ids.shape[1] > CORPUS.short_length
        return (token_losses if is_unrolled else self._losses)(self.model, token_ids)

    def loss(self, batch: Batch) -> Tensor:
        """Return the weighted mean loss of a batch, a scalar."""
        weights = next_weights(batch.weights.to(self.device))
        return (self.losses(batch.token_ids.to(self.device)) * weights).sum() / weights.sum()

    def apply(self, factor: float) -> None:
        """Apply the gradients at this share of the highest learning rates, and clear them."""
        for highest, optimizer in self._optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = highest * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """Return the mean held-out losses in nats a token."""
        held_out = self._held_out
        losses = torch.cat([self.losses(ids.to(self.device)).flatten() for ids, _ in held_out])
        weights = torch.cat([next_weights(weights).flatten() for _, weights in held_out])
        weights = weights.to(self.device)
        return {
            "held_out_response": losses[weights >= 1].mean().item(),
            "held_out_all_tokens": losses[weights > 0].mean().item(),
        }

    def note(self, figures: Mapping[str, float]) -> None:
        """Append a line to the log."""
        seconds = time.perf_counter() - self._started
        entry = {"step": self.step, "seconds": seconds, **figures}
        with self._log.open("a", encoding="utf-8") as log:
            log.write(json.dumps({key: round(value, 4) for key, value in entry.items()}) + "\n")
