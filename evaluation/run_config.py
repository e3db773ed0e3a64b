"""Options of a run, whatever the method: one dataclass, the only place with their defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.questions import DATA_FOLDER

DTYPES = ("auto", "float32", "float64", "float16", "bfloat16")


def _option(default: Any, help_text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **metadata})


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Options of a run, whatever the method; names are Spec-Bench's where it has the option."""

    model_path: str = _option(
        str(DATA_FOLDER / "demo" / "model"), "folder or hub name of the target model"
    )
    model_id: str | None = _option(None, "name of the run in answers and tables (default: made up)")
    bench_name: str = _option("demo", "benchmark: a folder in data/ with a question.jsonl")
    question_file: str | None = _option(None, "JSONL file of questions, instead of --bench-name's")
    question_begin: int | None = _option(None, "index of the first question")
    question_end: int | None = _option(None, "index after the last question")
    answer_file: str | None = _option(
        None, "JSONL file of answers (default: data/BENCH/model_answer/MODEL_ID.jsonl)"
    )
    resume: bool = _option(
        False, "go on with an answer file that is there (this is also the default)"
    )
    overwrite: bool = _option(False, "begin anew instead of going on with an answer file")
    max_new_tokens: int = _option(1024, "limit of new tokens a turn", aliases=("--max-new-token",))
    num_choices: int = _option(1, "answers to each question")
    temperature: float = _option(0.0, "0: greedy; above: sampling")
    top_k: int = _option(0, "sample from the k likeliest tokens; 0: all")
    top_p: float = _option(1.0, "sample from the likeliest tokens with this total probability")
    seed: int = _option(0, "seed of sampling; choice i uses SEED + i, as in Spec-Bench")
    dtype: str = _option("auto", "auto: float32 on CPU, float16 elsewhere", choices=DTYPES)
    device: str = _option("auto", "auto, cpu, cuda, cuda:1, mps, ...")
    threads: int | None = _option(None, "CPU threads (default: torch's)")
    num_gpus_per_model: int = _option(1, "GPUs that one model is spread over")
    num_gpus_total: int = _option(1, "GPUs in all; must equal --num-gpus-per-model")
    conv_template: str = _option(
        "auto",
        "auto: fastchat's for models it knows, else the tokenizer's; tokenizer; a fastchat name",
    )
    warmup: int = _option(3, "unmeasured passes over the first question")

    def __post_init__(self) -> None:
        """Validate what needs no file and no device.

        Raises:
            ValueError: naming the option, what was given, what is allowed.
        """
        for name, lowest in (
            ("max_new_tokens", 1),
            ("num_choices", 1),
            ("top_k", 0),
            ("seed", 0),
            ("threads", 1),
            ("num_gpus_per_model", 1),
            ("num_gpus_total", 1),
            ("warmup", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ValueError(f"{name}: got {value}; allowed: {lowest} or more")
        if self.seed >= 2**63:
            raise ValueError(f"seed: got {self.seed}; allowed: less than 2**63")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: got {self.temperature}; allowed: 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}; allowed: above 0, at most 1")
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            raise ValueError(
                "top_k, top_p: need sampling; give a --temperature above 0, or leave them out"
            )
        if self.num_gpus_total != self.num_gpus_per_model:
            raise ValueError(
                f"num_gpus_total: got {self.num_gpus_total} with num_gpus_per_model {self.num_gpus_per_model}; "
                "allowed: equal numbers; run more workers as commands over parts of the questions "
                "(--question-begin, --question-end)"
            )
        if self.resume and self.overwrite:
            raise ValueError("resume, overwrite: got both; leave one out")
        if self.model_id is not None and (
            not self.model_id or Path(self.model_id).name != self.model_id
        ):
            raise ValueError(f"model_id: got {self.model_id!r}; allowed: a name without '/'")
