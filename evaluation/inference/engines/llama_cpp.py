"""llama.cpp as a participant: the same GGUF file, prompts and answers as the same token ids.

The package `xllamacpp` holds llama.cpp and its server, which runs in a process of its own (`llama_cpp_server`). The
server's path /completion takes and gives token ids. It rounds otherwise than we do (by default its KV cache is
float16), so that its answers are marked as a server's: compared, and never called "not lossless".

Times: `prefill_time` and `decode_time` are its own `timings`. Its prompt's time includes the first new token.
"""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import torch

from evaluation.answers.record import SERVED
from evaluation.answers.row import Turn
from evaluation.inference.answering import Answerer, Prompt
from evaluation.inference.config import RunConfig
from evaluation.inference.engines.llama_cpp_server import LlamaCppServer
from evaluation.inference.plan import OtherProgram, Plan
from evaluation.inference.transformers_generate import room_of
from model.api.loading.weights import is_gguf
from model.backends.target import TargetModel
from model.commands.command_line import UserError, user_errors
from model.commands.loading import choose_device
from model.options import Options, option

PLAIN, NGRAM = "llama.cpp", "llama.cpp-ngram"
PACKAGE = "xllamacpp"
# Of its five kinds that draft by n-grams, the one that wastes least. On eight demo questions (SmolLM2-135M, Q8_0,
# 694 tokens) it drafted nothing, the others 30 to 118 tokens of which 5 to 21 were right. Asked the last question
# again, it alone drafted, and all 53 tokens were right: it remembers other texts.
BEST_NGRAM = "ngram_mod"
STOP_REASONS = {"limit": "length"}


@dataclass(frozen=True, slots=True)
class LlamaCppConfig(Options):
    """How llama.cpp drafts."""

    speculation: str | None = option(None, "llama.cpp's name of its speculation (default: none)")


@dataclass(frozen=True, slots=True)
class LlamaCpp(OtherProgram):
    """llama.cpp on the GGUF file of the run, plain or with its n-gram speculation."""

    def config(self, draft_model: str | None) -> LlamaCppConfig:
        return LlamaCppConfig(BEST_NGRAM if self.name == NGRAM else None)

    def check(self, run: RunConfig) -> None:
        """Refuse runs without the package or a GGUF file, and options that mean something else in llama.cpp."""
        if find_spec(PACKAGE) is None:
            raise UserError(
                f"methods: got {self.name}, which needs {PACKAGE}; pip install {PACKAGE}"
            )
        if not is_gguf(run.model.model_path):
            raise UserError(
                f"model_path: got {run.model.model_path} with {self.name}; allowed: a GGUF file; give "
                "--model-path FILE.gguf"
            )
        device, sampling = choose_device(run.model), run.sampling
        allowed = {
            "device": (device.type, "cpu"),
            "batch_size": (run.answers.batch_size, 1),
            "temperature": (sampling.temperature, 0),
            "repetition_penalty": (sampling.repetition_penalty, 1),
            "stop": (sampling.stop, ()),
        }
        for name, (given, only) in allowed.items():
            if given != only:
                shown = " ".join(given) if isinstance(given, tuple) else given
                advice = "give --device cpu" if name == "device" else "leave one out"
                raise UserError(
                    f"{name}: got {shown} with {self.name}; allowed: {'none' if only == () else only}; "
                    f"{advice}"
                )

    def circumstances(self) -> dict[str, Any]:
        """Return what the sidecar of its answers says instead: the target's precision is not theirs."""
        import xllamacpp

        return {SERVED: True, "dtype": None, "weights": None, PACKAGE: xllamacpp.__version__}

    def answerer(self, plan: Plan, target: TargetModel | None) -> Answerer:
        assert target is not None, "a comparison with it has the model in hands"
        return LlamaCppAnswerer(plan, target)


LLAMA_CPP: dict[str, OtherProgram] = {name: LlamaCpp(name) for name in (PLAIN, NGRAM)}


class LlamaCppAnswerer(Answerer):
    """llama.cpp, greedy, with torch's number of threads. It keeps to the context of the model in our hands."""

    def __init__(self, plan: Plan, target: TargetModel) -> None:
        self._target, self._path = target, plan.run.model.model_path
        self._max_new_tokens = plan.run.sampling.max_new_tokens
        self._speculation: str | None = plan.participant.config.speculation
        longest = plan.longest_text()
        self._longest_text = min(longest, target.context_limit() or longest)
        self._server = self._started()

    def end_warmup(self) -> None:
        """Forget the warm-up: its n-grams are kept across questions."""
        if self._speculation:
            self._server.close()  # one at a time is in memory
            self._server = self._started()

    def answer(self, prompt: Prompt) -> Turn:
        prompt_ids = prompt.token_ids
        asked = {
            "prompt": prompt_ids,
            "n_predict": room_of(self._target, len(prompt_ids), self._max_new_tokens),
            "temperature": 0,
            "top_k": 1,
            "cache_prompt": False,
            "return_tokens": True,
        }
        start = time.perf_counter()
        reply = self._reply(asked)
        wall_time = time.perf_counter() - start
        token_ids, timings = reply["tokens"], reply["timings"]
        prefill_time = timings["prompt_ms"] / 1000
        details = {
            "prompt_tokens": len(prompt_ids),
            "prefill_time": prefill_time,
            "time_to_first_token": prefill_time,
            "decode_time": timings["predicted_ms"] / 1000,
            "stop_reasons": STOP_REASONS.get(reply["stop_type"], reply["stop_type"]),
            # Every pass gives one token beside the accepted ones; it says no more of its steps.
            # Of the last step it may count drafts past the end of the text.
            "decoding_steps": max(1, len(token_ids) - timings.get("draft_n_accepted", 0)),
            "draft_tokens": timings.get("draft_n", 0),
        }
        return Turn(token_ids, None, wall_time, details)

    def _started(self) -> LlamaCppServer:
        with user_errors():
            return LlamaCppServer(
                self._path, self._longest_text, torch.get_num_threads(), self._speculation
            )

    def _reply(self, asked: dict[str, Any]) -> dict[str, Any]:
        address = urlsplit(self._server.address)
        with closing(HTTPConnection(str(address.hostname), address.port)) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/completion", json.dumps(asked), headers)
            reply: dict[str, Any] = json.load(connection.getresponse())
        if "error" in reply:
            raise RuntimeError(f"llama.cpp: {reply['error']['message']}")
        return reply
