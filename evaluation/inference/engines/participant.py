"""Programs of other projects as participants: llama.cpp, OpenVINO GenAI and CTranslate2, on the CPU.

Each gets our prompts as token ids, decodes greedily with torch's number of threads, keeps to our limit of new
tokens and ends of text, and returns token ids. They round otherwise than we do: their answers are marked as a
server's, compared, and never called "not lossless".

Times: `prefill_time` and `decode_time` are the program's own. Its prompt's time includes the first new token. Steps
are its passes, that over the prompt included.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch

from evaluation.answers.record import SERVED
from evaluation.answers.row import Turn
from evaluation.inference.answering import Answerer, Prompt
from evaluation.inference.config import RunConfig
from evaluation.inference.engines.llama_cpp import NGRAM_SIZES
from evaluation.inference.engines.process import EngineProcess
from evaluation.inference.plan import OtherProgram, Plan
from evaluation.inference.transformers_generate import room_of
from model.api.loading.weights import is_gguf
from model.backends.target import TargetModel
from model.commands.command_line import UserError
from model.commands.loading import choose_device
from model.machine.hardware import instruction_sets
from model.options import Options, option

# llama.cpp's names of instruction sets that are not Linux's in capitals; "" of one that it does not tell.
BUILT_AS = {"avx512f": "AVX512", "asimddp": "DOTPROD", "i8mm": "MATMUL_INT8"} | dict.fromkeys(
    ("avx", "amx_bf16", "asimd", "bf16", "sve2"), ""
)


@dataclass(frozen=True, slots=True)
class EngineConfig(Options):
    """Which model an engine reads, and how it drafts."""

    model: str | None = option(
        None, "the same model as this program takes it (default: --model-path)"
    )
    speculation: str | None = option(
        None, "llama.cpp's name of its speculation", choices=tuple(NGRAM_SIZES)
    )
    ngram: int | None = option(None, "tokens of the n-gram that is looked up", least=1)
    draft: int | None = option(None, "most tokens of a draft", least=1)
    draft_model: str | None = option(None, "GGUF file of the model that llama.cpp drafts with")


@dataclass(frozen=True, slots=True)
class Engine(OtherProgram):
    """A program that decodes the same model in a process of its own."""

    usual: EngineConfig = EngineConfig()

    package: ClassVar[str]  # what pip installs
    module: ClassVar[str]  # of this folder, which the process runs

    def config(self, draft_model: str | None) -> EngineConfig:
        return replace(self.usual, draft_model=draft_model) if self.name == DRAFT else self.usual

    def check(self, run: RunConfig, config: EngineConfig) -> None:
        """Refuse runs without the package or a model that it reads, and options that mean something else there."""
        if find_spec(self.package.replace("-", "_")) is None:
            raise UserError(
                f"methods: got {self.name}, which needs {self.package}; pip install {self.package}"
            )
        self.check_model(config.model or run.model.model_path)
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

    def check_model(self, path: str) -> None:
        """Refuse a file or folder that it does not read."""
        raise NotImplementedError

    def lacking(self, features: str) -> str:
        """Return this machine's instruction sets that its build lacks: none of one that chooses them as it runs."""
        return ""

    def circumstances(self) -> dict[str, Any]:
        """Return what the sidecar of its answers says instead: the target's precision is not theirs."""
        return {SERVED: True, "dtype": None, "weights": None}

    def answerer(self, plan: Plan, target: TargetModel | None) -> Answerer:
        assert target is not None, "a comparison with it has the model in hands"
        return EngineAnswerer(plan, target, self)


class LlamaCpp(Engine):
    """llama.cpp on the GGUF file of the run."""

    package, module = "xllamacpp", "llama_cpp"

    def check_model(self, path: str) -> None:
        if not is_gguf(path):
            raise UserError(
                f"model_path: got {path} with {self.name}; allowed: a GGUF file; give --model-path FILE.gguf"
            )

    def lacking(self, features: str) -> str:
        names = (BUILT_AS.get(name, name.upper()) for name in instruction_sets())
        return " ".join(name for name in names if name and name not in features.split())


class OpenVino(Engine):
    """OpenVINO GenAI, plain or with its prompt lookup."""

    package, module = "openvino-genai", "openvino"

    def check_model(self, path: str) -> None:
        if not is_gguf(path) and not (Path(path) / "openvino_model.xml").is_file():
            raise UserError(
                f"model: got {path} with {self.name}; allowed: a GGUF file, or a folder of optimum-intel's with "
                f'openvino_model.xml; give "{self.name} --model PATH"'
            )


class CTranslate2(Engine):
    """CTranslate2, which has no speculation for such models."""

    package = module = "ctranslate2"

    def check_model(self, path: str) -> None:
        if not (Path(path) / "model.bin").is_file():
            raise UserError(
                f"model: got {path} with {self.name}; allowed: a folder that ct2-transformers-converter wrote; "
                f'give "{self.name} --model FOLDER"'
            )


DRAFT = "llama.cpp-draft"
# Of its kinds that draft by n-grams, and of some sizes, the one with the fewest steps: 405 for 473 tokens of eight
# demo questions (SmolLM2-135M, Q4_1), 425 with n-grams of 3 and drafts of 8; ngram_mod 429, the others 435 or more.
# With their own sizes all four draft nothing there. docs/numbers.md has the sweep.
BEST_NGRAM = EngineConfig(speculation="ngram_simple", ngram=2, draft=4)
SIZES = ("ngram", "draft")
ENGINES: dict[str, OtherProgram] = {
    engine.name: engine
    for engine in (
        LlamaCpp("llama.cpp"),
        LlamaCpp("llama.cpp-ngram", ("speculation", *SIZES), BEST_NGRAM),
        LlamaCpp(DRAFT, ("draft_model", "draft")),
        OpenVino("openvino", ("model",)),
        OpenVino("openvino-pld", ("model", *SIZES), EngineConfig(ngram=3, draft=5)),
        CTranslate2("ctranslate2", ("model",)),
    )
}


class EngineAnswerer(Answerer):
    """An engine in its process. It keeps to the context of the model in our hands."""

    def __init__(self, plan: Plan, target: TargetModel, engine: Engine) -> None:
        run, config, longest = plan.run, plan.participant.config, plan.longest_text()
        self._target, self._engine = target, engine
        self._max_new_tokens, self._ends = run.sampling.max_new_tokens, plan.eos_ids(target)
        self._options = asdict(config) | {
            "model": config.model or run.model.model_path,
            "threads": torch.get_num_threads(),
            "context": min(longest, target.context_limit() or longest),
            "dtype": str(target.dtype).removeprefix("torch."),
            "ends": sorted(self._ends),
        }
        self._process = self._started()
        facts = self._process.facts
        plan.log.note(engine={**facts, "lacks": engine.lacking(facts["features"])})

    def end_warmup(self) -> None:
        """Forget the warm-up: llama.cpp's n-grams are kept across questions."""
        if self._options.get("speculation"):
            self._process.close()  # one at a time is in memory
            self._process = self._started()

    def answer(self, prompt: Prompt) -> Turn:
        prompt_ids = prompt.token_ids
        room = room_of(self._target, len(prompt_ids), self._max_new_tokens)
        start = time.perf_counter()
        details = self._process.ask(prompt=prompt_ids, room=room)
        wall_time = time.perf_counter() - start
        token_ids = details.pop("token_ids")
        is_ended = bool(token_ids) and token_ids[-1] in self._ends
        details = {
            "prompt_tokens": len(prompt_ids),
            "time_to_first_token": details["prefill_time"],
            "stop_reasons": "eos" if is_ended else "length",
            **details,
        }
        return Turn(token_ids, None, wall_time, details)

    def _started(self) -> EngineProcess:
        try:
            module = f"{__package__}.{self._engine.module}"
            return EngineProcess(module, self._options)
        except RuntimeError as error:
            raise UserError(
                f"{self._engine.name} cannot load {self._options['model']}: {error}"
            ) from error
