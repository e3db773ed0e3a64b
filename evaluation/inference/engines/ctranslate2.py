"""CTranslate2 in its process: a folder that its converter wrote, in the precision that it was converted to."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class Engine:
    """A model that decodes greedily. Of each token it says when it came, so that the prompt's time is known."""

    def __init__(self, *, model: str, threads: int, ends: list[int], **_: Any) -> None:
        import ctranslate2

        self._generator = ctranslate2.Generator(
            model, device="cpu", inter_threads=1, intra_threads=threads
        )
        self._tokens = json.loads((Path(model) / "vocabulary.json").read_text(encoding="utf-8"))
        self._ends = ends
        types = sorted(ctranslate2.get_supported_compute_types("cpu"))
        self.facts = {
            "program": f"ctranslate2 {ctranslate2.__version__}",
            "precision": self._generator.compute_type,
            "features": " ".join(types),
        }

    def answer(self, prompt: list[int], room: int) -> dict[str, Any]:
        """Return an answer's tokens, times in seconds, and passes, that over the prompt among them."""
        times = list[float]()

        def note(_: Any) -> bool:
            times.append(time.perf_counter())
            return False  # go on

        start = time.perf_counter()
        (result,) = self._generator.generate_batch(
            [[self._tokens[token] for token in prompt]],
            max_length=room,
            end_token=self._ends,
            return_end_token=True,
            include_prompt_in_result=False,
            callback=note,
        )
        end = time.perf_counter()
        token_ids = list(result.sequences_ids[0])
        return {
            "token_ids": token_ids,
            "prefill_time": times[0] - start,
            "decode_time": end - times[0],
            "decoding_steps": len(token_ids),
            "draft_tokens": 0,
        }
