"""OpenVINO GenAI in its process, on a GGUF file, or on a folder that optimum-intel exported."""

from __future__ import annotations

import sys
from typing import Any


class Engine:
    """A model that decodes as its defaults say, but for precision, threads, prompt lookup and its prefix cache.

    The cache would make a prompt cheap that was asked before, or in an earlier turn: it is off, as in our methods.
    """

    def __init__(
        self,
        *,
        model: str,
        threads: int,
        dtype: str,
        ends: list[int],
        ngram: int | None,
        draft: int | None,
        **_: Any,
    ) -> None:
        import openvino
        import openvino_genai

        self._genai, self._tensor = openvino_genai, openvino.Tensor
        # It takes float32 where the processor lacks one.
        precision = {"bfloat16": "bf16", "float16": "f16"}.get(dtype, "f32")
        settings = {"INFERENCE_PRECISION_HINT": precision}
        core = openvino.Core()
        core.set_property("CPU", settings)
        computed, kept = (
            core.get_property("CPU", name).get_type_name()
            for name in ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION")
        )
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = sys.maxsize  # a prompt in one pass, as its default
        self._config = openvino_genai.GenerationConfig(do_sample=False, ignore_eos=not ends)
        if ends:
            self._config.set_eos_token_id(ends[0])
            self._config.stop_token_ids = set(ends)
        if draft:
            self._config.num_assistant_tokens, self._config.max_ngram_size = draft, ngram
        self._pipeline = openvino_genai.LLMPipeline(
            model,
            "CPU",
            scheduler_config=scheduler,
            INFERENCE_NUM_THREADS=threads,
            **settings,
            **({"prompt_lookup": True} if draft else {}),
        )
        self.facts = {
            "program": f"openvino-genai {openvino_genai.__version__}",
            "precision": f"{computed} with a KV cache of {kept}",
            "features": " ".join(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")),
        }

    def answer(self, prompt: list[int], room: int) -> dict[str, Any]:
        """Return an answer's tokens, times in seconds, and passes, that over the prompt among them."""
        import numpy as np

        ids = np.array([prompt], dtype=np.int64)
        inputs = self._genai.TokenizedInputs(self._tensor(ids), self._tensor(np.ones_like(ids)))
        self._config.max_new_tokens = room
        result = self._pipeline.generate(inputs, self._config)
        metrics = result.perf_metrics
        prefill_time = metrics.get_ttft().mean / 1000
        rows = list(metrics.raw_metrics.m_batch_sizes)  # of each pass
        return {
            "token_ids": list(result.tokens[0]),
            "prefill_time": prefill_time,
            "decode_time": metrics.get_generate_duration().mean / 1000 - prefill_time,
            "decoding_steps": len(rows),
            "draft_tokens": sum(rows) - len(rows),
        }
