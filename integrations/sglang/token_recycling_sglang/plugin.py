"""Registers TOKEN_RECYCLING with SGLang (entry point group `sglang.srt.plugins`).

Held to the seams of SGLang 0.5.23: its registry, its n-gram worker and its tree links are imported
and used by the tests. The engine itself needs CUDA, and was not run.
"""

from __future__ import annotations

import inspect
import logging
from importlib.metadata import version
from typing import Any

from .trees import RecycledTrees

logger = logging.getLogger(__name__)
NAME = "TOKEN_RECYCLING"
TESTED = "0.5.23"
TOP_K = 8
# Methods of SGLang's n-gram worker that the worker is built on, and parameters that they must have.
SEAMS = {
    "forward_batch_generation": ("batch",),
    "_prepare_draft_tokens": ("batch",),
    "clear_cache_pool": (),
}


def register() -> None:
    """Register the algorithm; SGLang calls this in every process.

    Raises:
        RuntimeError: if this SGLang lacks what the worker is built on.
    """
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

    class TokenRecycling(CustomSpecAlgo):
        """Served as SGLang serves its n-gram algorithm, whose worker it extends."""

        def is_ngram(self) -> bool:
            """Return True: the scheduler, graph capture and the relay of overlapped steps ask this."""
            return True

        def has_draft_kv(self) -> bool:
            """Return False: drafts need no cache."""
            return False

        def handle_server_args(self, server_args: Any) -> None:
            """Settle the server's options as for n-grams."""
            from sglang.srt.arg_groups.speculative_hook import _handle_ngram

            _handle_ngram(server_args)

    if get_spec(NAME) is None:
        decorate = SpeculativeAlgorithm.register(
            NAME, supports_overlap=True, spec_class=TokenRecycling
        )
        decorate(lambda server_args: make_worker_class())
        logger.info("Token Recycling: registered %s (not run in the engine yet)", NAME)


def make_worker_class() -> type:
    """Return the worker: SGLang's n-gram worker with other trees, which learn from the logits."""
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    check_worker(NGRAMWorker)

    class RecyclingWorker(NGRAMWorker):
        """Drafts trees from the adjacency matrix and writes the logits of every node back."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            vocab_size = self.model_runner.model_config.vocab_size
            self.ngram_corpus = RecycledTrees(vocab_size, TOP_K, self.draft_token_num)

        def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            """Verify a batch of trees, or read prompts."""
            is_decode = batch.forward_mode.is_decode()
            result = super().forward_batch_generation(batch, *args, **kwargs)
            if is_decode:
                self.ngram_corpus.observe(
                    result.logits_output.next_token_logits,
                    result.next_token_ids,
                    result.accept_lens,
                )
            return result

    return RecyclingWorker


def check_worker(worker_class: type) -> None:
    """Raise RuntimeError if SGLang's n-gram worker is not the one that is known."""
    lacks = []
    for name, parameters in SEAMS.items():
        method = getattr(worker_class, name, None)
        if method is None:
            lacks.append(f"no {name}")
            continue
        found = inspect.signature(method).parameters
        lacks += [f"{name} has no parameter {item}" for item in parameters if item not in found]
    if lacks:
        raise RuntimeError(
            f"Token Recycling does not fit SGLang {version('sglang')} (known: {TESTED}): NGRAMWorker: "
            + "; ".join(lacks)
        )
