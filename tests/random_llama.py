"""A tiny random Llama, from the sizes that most tests share."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def random_llama(vocab_size: int, seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """Return a model with weights so large that logits differ clearly; the same for the same arguments.

    Args:
        vocab_size: number of tokens.
        seed: of the weights.
        options: of its config, where they are to be others.
    """
    sizes = {"hidden_size": 32, "intermediate_size": 48}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=vocab_size, **{**sizes, **layers, **options})
    return LlamaForCausalLM(config).eval()
