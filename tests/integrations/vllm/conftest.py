"""A proposer without vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from token_recycling_vllm import RecyclingProposer, seams

from .engine import VOCAB


@pytest.fixture
def make_proposer(monkeypatch):
    """A function that makes a proposer, as vLLM does, with options."""
    monkeypatch.setattr(seams, "check_vllm", lambda: None)

    def make(num_speculative_tokens: int = 4, **options) -> RecyclingProposer:
        options = {"top_k": 4, "table_bits": 12, "history_tokens": 4096, **options}
        return RecyclingProposer(
            SimpleNamespace(
                additional_config={"token_recycling": options},
                speculative_config=SimpleNamespace(num_speculative_tokens=num_speculative_tokens),
                model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB),
            )
        )

    return make
