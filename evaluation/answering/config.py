"""Options of a run, whatever the method: one dataclass, the only place with their defaults."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.questions.questions import DATA_FOLDER
from model.options import DTYPES, check_options, option

STATE_ORDERS = ("any", "single")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Options of a run, whatever the method; names are Spec-Bench's where it has the option."""

    model_path: str = option(
        str(DATA_FOLDER / "demo" / "model"), "folder or hub name of the target model"
    )
    model_id: str | None = option(None, "name of the run in answers and tables (default: made up)")
    bench_name: str = option("demo", "benchmark: a folder in data/ with a question.jsonl")
    question_file: str | None = option(None, "JSONL file of questions, instead of --bench-name's")
    question_begin: int | None = option(None, "index of the first question")
    question_end: int | None = option(None, "index after the last question")
    shuffle: int | None = option(
        None, "seed of another order of the questions: what a matrix saw before counts", least=0
    )
    answer_file: str | None = option(
        None, "JSONL file of answers (default: data/BENCH/model_answer/MODEL_ID.jsonl)"
    )
    resume: bool = option(
        False, "go on with an answer file that is there (this is also the default)"
    )
    overwrite: bool = option(False, "begin anew instead of going on with an answer file")
    max_new_tokens: int = option(
        1024, "limit of new tokens a turn", least=1, aliases=("--max-new-token",)
    )
    num_choices: int = option(1, "answers to each question", least=1)
    temperature: float = option(0.0, "0: greedy; above: sampling")
    top_k: int = option(0, "sample from the k likeliest tokens; 0: all", least=0)
    top_p: float = option(1.0, "sample from the likeliest tokens with this total probability")
    seed: int = option(0, "seed of sampling; choice i, in a chat turn i, uses SEED + i", least=0)
    dtype: str = option("auto", "auto: float32 on CPU, float16 elsewhere", choices=DTYPES)
    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps, ...")
    threads: int | None = option(None, "CPU threads (default: torch's)", least=1)
    compile: bool = option(
        False, "static shapes through torch.compile, on a GPU as CUDA graphs; compiles for minutes"
    )
    num_gpus_per_model: int = option(1, "GPUs that one model is spread over", least=1)
    num_gpus_total: int = option(
        1,
        "GPUs in all; more than --num-gpus-per-model: that many more workers, through Ray",
        least=1,
    )
    num_workers: int | None = option(
        None, "worker processes on CPU, a model each, through Ray, with --threads each", least=1
    )
    ray_address: str | None = option(
        None, "Ray cluster to run on, such as auto or HOST:6379 (default: this machine)"
    )
    state_order: str = option(
        "any",
        "any: a worker's matrix holds what that worker answered; single: one worker's order, so "
        "that acceptance lengths repeat",
        choices=STATE_ORDERS,
    )
    shard: str | None = option(
        None, "I/N: every N-th question from the I-th on; put together by evaluation.merge"
    )
    trust_remote_code: bool = option(
        False, "run the Python code that comes with a model; it can do anything that you can"
    )
    allow_pickle: bool = option(
        False, "load weights that are no safetensors; a pickle can run code when it is read"
    )
    conv_template: str = option(
        "auto",
        "auto: fastchat's for models it knows, else the tokenizer's; tokenizer; a fastchat name",
    )
    warmup: int = option(3, "unmeasured passes over the first question", least=0)

    def __post_init__(self) -> None:
        """Validate what needs no file and no device.

        Raises:
            ValueError: naming the option, what was given, what is allowed.
        """
        check_options(self)
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
        if self.temperature == 0 and self.seed:
            raise ValueError(
                f"seed: got {self.seed}, which needs sampling; give a --temperature above 0, or leave it out"
            )
        if self.num_gpus_total % self.num_gpus_per_model:
            raise ValueError(
                f"num_gpus_total: got {self.num_gpus_total} with num_gpus_per_model {self.num_gpus_per_model}; "
                "allowed: a multiple of it"
            )
        if self.num_workers and self.num_gpus_total > self.num_gpus_per_model:
            raise ValueError(
                "num_workers, num_gpus_total: got both; num_workers counts workers on CPU; leave one out"
            )
        if self.state_order == "single" and not self.uses_ray:
            raise ValueError(
                "state_order: got single without workers, where it is so anyway; leave it out"
            )
        if self.shard is not None:
            self.part_of(range(1))
        if self.compile and self.uses_ray:
            raise ValueError("compile: got workers with it; leave one out, or use --shard")
        if self.compile and self.num_gpus_per_model > 1:
            raise ValueError(
                f"compile: got num_gpus_per_model {self.num_gpus_per_model} with it; allowed: 1"
            )
        if self.resume and self.overwrite:
            raise ValueError("resume, overwrite: got both; leave one out")
        if self.model_id is not None and (
            not self.model_id or Path(self.model_id).name != self.model_id
        ):
            raise ValueError(f"model_id: got {self.model_id!r}; allowed: a name without '/'")

    @property
    def worker_count(self) -> int:
        """How many models answer side by side."""
        return self.num_workers or self.num_gpus_total // self.num_gpus_per_model

    @property
    def uses_ray(self) -> bool:
        """Whether questions are answered in other processes."""
        return self.worker_count > 1 or self.ray_address is not None

    def in_order(self, questions: Sequence[Any]) -> Sequence[Any]:
        """Return the questions in the order of --shuffle; as they are without it."""
        if self.shuffle is None:
            return questions
        return random.Random(self.shuffle).sample(questions, len(questions))

    def part_of(self, questions: Sequence[Any]) -> Sequence[Any]:
        """Return this shard's part of the questions; all of them without --shard.

        Raises:
            ValueError: if the shard is not I/N with 1 <= I <= N.
        """
        if self.shard is None:
            return questions
        found = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", self.shard)
        if not found or int(found[1]) > int(found[2]):
            raise ValueError(
                f"shard: got {self.shard!r}; allowed: I/N with I from 1 to N, such as 1/4"
            )
        return questions[int(found[1]) - 1 :: int(found[2])]
