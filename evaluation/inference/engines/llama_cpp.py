"""llama.cpp in its process: the server of the package `xllamacpp`; its /completion takes and gives token ids.

The text ends where the file says. Every turn's prompt is read whole, as by our methods: `cache_prompt` is off.
"""

from __future__ import annotations

import json
import re
from contextlib import closing
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

# Its kinds of speculation by n-grams: the settings that are the tokens looked up, and the most of a draft.
NGRAM_SIZES = {
    "ngram_simple": ("size_n", "size_m"),
    "ngram_map_k": ("size_n", "size_m"),
    "ngram_map_k4v": ("size_n", "size_m"),
    "ngram_mod": ("n_match", "n_max"),
}


class Engine:
    """A server that decodes greedily, a text at a time, with drafts by n-grams or by a model if asked."""

    def __init__(
        self,
        *,
        model: str,
        context: int,
        threads: int,
        speculation: str | None,
        ngram: int | None,
        draft: int | None,
        draft_model: str | None,
        **_: Any,
    ) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_ctx, params.n_parallel = context, 1
        params.n_gpu_layers, params.verbosity = 0, 0
        for of_pass in (params.cpuparams, params.cpuparams_batch):
            of_pass.n_threads = threads
        drafting = params.speculative
        if draft_model:
            drafting.draft.mparams.path = draft_model
            drafting.draft.n_max = draft or drafting.draft.n_max
        elif speculation:
            of_kind = getattr(drafting, speculation)
            for name, value in zip(NGRAM_SIZES[speculation], (ngram, draft), strict=True):
                setattr(of_kind, name, value or getattr(of_kind, name))
            if draft and speculation == "ngram_mod":
                of_kind.n_min = 1  # it drafts at least 48 tokens otherwise, or none
        if kind := "draft_simple" if draft_model else speculation:
            name = f"COMMON_SPECULATIVE_TYPE_{kind.upper()}"
            drafting.types = [getattr(xllamacpp.common_speculative_type, name)]
        self._server = xllamacpp.Server(params)
        self.facts = {
            "program": f"xllamacpp {xllamacpp.__version__}",
            "precision": "weights as in the file, a KV cache of float16",
            "features": " ".join(re.findall(r"(\w+) = 1\b", xllamacpp.get_system_info())),
        }

    def answer(self, prompt: list[int], room: int) -> dict[str, Any]:
        """Return an answer's tokens, times in seconds, and passes, that over the prompt among them."""
        asked = {
            "prompt": prompt,
            "n_predict": room,
            "temperature": 0,
            "top_k": 1,
            "cache_prompt": False,
            "return_tokens": True,
        }
        address = urlsplit(self._server.listening_address)
        with closing(HTTPConnection(str(address.hostname), address.port)) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/completion", json.dumps(asked), headers)
            reply: dict[str, Any] = json.load(connection.getresponse())
        if "error" in reply:
            raise RuntimeError(f"llama.cpp: {reply['error']['message']}")
        token_ids, timings = reply["tokens"], reply["timings"]
        return {
            "token_ids": token_ids,
            "prefill_time": timings["prompt_ms"] / 1000,
            "decode_time": timings["predicted_ms"] / 1000,
            # Every pass gives one token beside the accepted ones; it says no more of its steps.
            # Of the last step it may count drafts past the end of the text.
            "decoding_steps": max(1, len(token_ids) - timings.get("draft_n_accepted", 0)),
            "draft_tokens": timings.get("draft_n", 0),
            "stop_reasons": "length" if reply["stop_type"] == "limit" else reply["stop_type"],
        }
