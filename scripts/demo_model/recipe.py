"""Recipe of the demo model: shape, budget, learning rates, optimizers.

The frozen configuration, the untrained model and its optimizers. The model card quotes these figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

CONTEXT = 3072  # the longest Spec-Bench prompt is 1,900 tokens; 1,024 new ones still fit


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Shape and recipe of the demo model.

    Attributes:
        vocab_size: Number of token ids.
        hidden: Width of the residual stream.
        layers: Number of decoder layers.
        heads: Number of attention heads.
        intermediate: Width of the feed-forward part.
        is_recurrent: Whether three of four layers have a recurrent state (the gated delta rule, as in
            Qwen3.5) in place of attention.
        minutes: Training time, counted over restarts; None when ``tokens`` rules.
        tokens: Number of training tokens (padding included); None when ``minutes`` rules.
        warmup_steps: Steps of linear warm-up.
        decay_share: Last share of the budget in which the learning rate falls to zero.
        muon_lr: Learning rate of the matrices.
        adam_lr: Learning rate of embeddings and norms.
        tokens_per_step: Tokens in one step, at most.
        seed: Seed of weights and data order.
    """

    vocab_size: int = 8192
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    intermediate: int = 704
    is_recurrent: bool = False
    minutes: float | None = 50.0
    tokens: int | None = None
    warmup_steps: int = 60
    decay_share: float = 0.4
    muon_lr: float = 0.02
    adam_lr: float = 2e-3
    tokens_per_step: int = 4608
    seed: int = 0

    def __post_init__(self) -> None:
        """Reject shapes that no model has, an unclear budget, and a model that transformers lacks."""
        if (self.minutes is None) == (self.tokens is None):
            raise ValueError("budget: got both or neither of minutes and tokens, allowed one")
        if self.hidden % (2 * self.heads) != 0:
            raise ValueError(
                f"hidden: got {self.hidden}, allowed multiples of 2 x heads ({2 * self.heads})"
            )
        if self.vocab_size < 300:
            raise ValueError(f"vocab_size: got {self.vocab_size}, allowed 300 or more")
        if not 0.0 <= self.decay_share <= 1.0:
            raise ValueError(f"decay_share: got {self.decay_share}, allowed 0 to 1")
        if self.is_recurrent and not hasattr(transformers, "Qwen3_5TextConfig"):
            raise ValueError(
                f"is_recurrent: got transformers {transformers.__version__}, allowed versions with Qwen3.5"
            )

    def progress(self, seconds: float, tokens: int) -> float:
        """Share of the budget that is spent."""
        if self.tokens is not None:
            return tokens / self.tokens
        return seconds / (60.0 * (self.minutes or 1.0))

    def lr_factor(self, step: int, progress: float) -> float:
        """Warm-up, constant, then 1 - sqrt down to zero; 1 is the full learning rate.

        At this batch size the constant phase ends in a plateau of noise; the square root leaves it
        sooner than a straight line does (Hägele et al. 2024, arXiv 2405.18392).
        """
        warmup = min(1.0, (step + 1) / self.warmup_steps)
        decayed = max(0.0, progress - (1.0 - self.decay_share)) / max(self.decay_share, 1e-9)
        return max(0.0, min(warmup, 1.0 - decayed**0.5))


class Optimizers(NamedTuple):
    """Muon for matrices, AdamW for embeddings and norms."""

    muon: torch.optim.Optimizer
    adam: torch.optim.Optimizer

    def step(self, muon_lr: float, adam_lr: float) -> None:
        """Apply the gradients with these learning rates and clear them."""
        for optimizer, lr in zip(self, (muon_lr, adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def build_model(config: TrainConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Make the untrained model; float32, on the CPU."""
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
    torch.manual_seed(config.seed)
    if not config.is_recurrent:
        return LlamaForCausalLM(LlamaConfig(**shape))
    return AutoModelForCausalLM.from_config(_recurrent_config(config, shape), dtype=torch.float32)


def _recurrent_config(config: TrainConfig, shape: dict[str, Any]) -> PretrainedConfig:
    """Return the configuration of a model like Qwen3.5: states in three of four layers."""
    head_dim = config.hidden // config.heads
    layers = range(1, config.layers + 1)
    found: PretrainedConfig = transformers.Qwen3_5TextConfig(
        **shape,
        head_dim=head_dim,
        layer_types=["linear_attention" if layer % 4 else "full_attention" for layer in layers],
        linear_num_key_heads=config.heads,
        linear_num_value_heads=config.heads,
        linear_key_head_dim=head_dim,
        linear_value_head_dim=head_dim,
    )
    return found


def build_optimizers(model: PreTrainedModel, config: TrainConfig) -> Optimizers:
    """Split the parameters between Muon (matrices inside layers) and AdamW (the rest)."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed_tokens" not in name
        (matrices if is_matrix else others).append(parameter)
    return Optimizers(
        torch.optim.Muon(matrices, lr=config.muon_lr, momentum=0.95),
        torch.optim.AdamW(others, lr=config.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    )
