"""A model for NVIDIA's specdec_bench (NVIDIA/Model-Optimizer, examples/specdec_bench): this library as an engine.

specdec_bench asks a model for the tokens of each step and their times, one prompt at a time here, and averages them
itself. Register it beside the others in its run.py:

    from token_recycling_specdec_bench import TokenRecyclingModel
    engines_available["TOKEN_RECYCLING"] = TokenRecyclingModel

and give `--engine TOKEN_RECYCLING --speculative_algorithm NONE --concurrency 1`; a runtime_params file says which
method: `engine_args: {method: hybrid, method_options: {num_nodes: 16}}`. The token that ends a text is left out, as
its models do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from token_recycling import SpeculativeDecoder

try:
    from specdec_bench.models.base import Model
except ImportError:  # outside the bench, as in tests
    Model = object


class TokenRecyclingModel(Model):
    """Greedy decoding with a method of this library; keywords that it does not know are other engines'."""

    def __init__(
        self,
        model_dir: str,
        max_concurrent_requests: int = 1,
        sampling_kwargs: dict[str, Any] | None = None,
        method: str | None = None,
        method_options: dict[str, Any] | None = None,
        dtype: str = "auto",
        **_: Any,
    ) -> None:
        if max_concurrent_requests != 1:
            raise ValueError(f"concurrency: got {max_concurrent_requests}; allowed: 1")
        if (sampling_kwargs or {}).get("temperature", 0):
            raise ValueError("temperature: got sampling; allowed: 0")
        self.decoder = SpeculativeDecoder.from_pretrained(
            model_dir, method=method, dtype=dtype, **(method_options or {})
        )
        self._config = {"method": method, "method_options": method_options, "dtype": dtype}

    async def run(
        self, prompt_ids: Sequence[int], max_length: int, end_id: int, request_id: int, turn_id: int
    ) -> dict[str, Any]:
        """Return the tokens of every step, of one beam, and the times: of the begin, and of each step's end.

        `end_id` ends a text; -1: nothing does.
        """
        times, chunks = [time.perf_counter()], []
        ends = [] if end_id == -1 else [end_id]
        for step in self.decoder.steps(prompt_ids, max_new_tokens=max_length, eos_ids=ends):
            if tokens := [token for token in step.tokens if token not in ends]:
                times.append(time.perf_counter())
                chunks.append(tokens)
        return {"output_ids": [chunks], "output_logits": None, "token_times": times}

    def get_serving_config(self) -> dict[str, Any]:
        """Return what configuration.json says of this model."""
        return self._config

    def stop(self) -> None:
        """Do nothing: there is no process beside this one."""
