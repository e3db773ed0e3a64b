"""Options of a run that every method has: dataclasses, the only place with their defaults."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from model.commands.command_line import config_of
from model.commands.model_options import ModelOptions, SamplingOptions
from model.options import Options, option


@dataclass(frozen=True, slots=True)
class QuestionOptions(Options):
    """Which questions are answered, and in which order."""

    bench_name: str = option("demo", "benchmark: a folder in data/ with a question.jsonl")
    question_file: str | None = option(None, "JSONL file of questions, instead of --bench-name's")
    question_begin: int | None = option(None, "index of the first question")
    question_end: int | None = option(None, "index after the last question")
    num_questions: int | None = option(
        None, "use N questions, evenly spread over the file (default: all)", least=1
    )
    prompt_tokens: str | None = option(
        None,
        "use the questions whose first prompt has MIN to MAX tokens by the model's "
        "tokenizer, such as 512:1024; one of the two may be left out",
        metavar="MIN:MAX",
    )
    shuffle: int | None = option(
        None, "seed to shuffle the questions; acceptance depends on their order", least=0
    )
    category_map: tuple[str, ...] = option(
        (),
        "rename a category in answers and tables, such as math=math_reasoning for GSM8K "
        "in files of EAGLE",
        metavar="OLD=NEW",
    )
    shard: str | None = option(
        None,
        "I/N: every N-th question, starting at the I-th; evaluation.answers.merge joins the answer files",
    )

    def _check(self) -> None:
        if self.shard is not None:
            self.part_of(range(1))
        self.has_length(0)
        object.__setattr__(self, "category_map", tuple(self.category_map))  # of a list

    def has_length(self, num_tokens: int) -> bool:
        """Whether a first prompt of so many tokens is asked; a `ValueError` if the bounds are not MIN:MAX."""
        if self.prompt_tokens is None:
            return True
        found = re.fullmatch(r"(\d{0,9}):(\d{0,9})", self.prompt_tokens)
        least, most = (int(found[1] or 0), int(found[2] or 10**9)) if found else (1, 0)
        if least > most or self.prompt_tokens == ":":
            raise ValueError(
                f"prompt_tokens: got {self.prompt_tokens!r}; allowed: MIN:MAX, such as 512:1024, 512: or :1024"
            )
        return least <= num_tokens <= most

    def in_order(self, questions: Sequence[Any]) -> Sequence[Any]:
        if self.shuffle is None:
            return questions
        return random.Random(self.shuffle).sample(questions, len(questions))

    def part_of(self, questions: Sequence[Any]) -> Sequence[Any]:
        """Return this shard's part of the questions, or all; a `ValueError` if it is not I/N with 1 <= I <= N."""
        if self.shard is None:
            return questions
        found = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", self.shard)
        if not found or int(found[1]) > int(found[2]):
            raise ValueError(
                f"shard: got {self.shard!r}; allowed: I/N with I from 1 to N, such as 1/4"
            )
        return questions[int(found[1]) - 1 :: int(found[2])]


@dataclass(frozen=True, slots=True)
class DecodingOptions(SamplingOptions):
    """How tokens are chosen, and what ends an answer."""

    min_p: float = option(
        0.0, "sample from tokens with this share of the likeliest one's probability or more; 0: all"
    )
    repetition_penalty: float = option(
        1.0, "above 1: tokens of prompt and answer become less likely, in greedy decoding too"
    )
    stop: tuple[str, ...] = option(
        (),
        "end an answer after the token that completes one of these strings; the string "
        "stays in the answer "
        "(a new line in bash: $'\\n')",
        metavar="STRING",
    )

    def _check(self) -> None:
        SamplingOptions._check(self)  # slots: the class that super() knows is another one
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p: got {self.min_p}; allowed: 0 to 1")
        if self.temperature == 0 and self.min_p:
            raise ValueError("min_p: needs sampling; give a --temperature above 0, or leave it out")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty: got {self.repetition_penalty}; allowed: above 0")
        if "" in self.stop:
            raise ValueError("stop: got an empty text; allowed: texts with a character or more")


@dataclass(frozen=True, slots=True)
class WorkerOptions(Options):
    """Processes that answer side by side."""

    num_gpus_total: int = option(
        1,
        "total number of GPUs; with more than --num-gpus-per-model there are several "
        "workers, through Ray",
        least=1,
    )
    num_workers: int | None = option(
        None,
        "worker processes on the CPU, through Ray, each with its own model and --threads threads",
        least=1,
    )
    ray_address: str | None = option(
        None, "Ray cluster to run on, such as auto or HOST:6379 (default: this machine)"
    )
    state_order: str = option(
        "any",
        "any: each worker's matrix learns from its own answers; single: one worker "
        "answers in order, so acceptance lengths are reproducible",
        choices=("any", "single"),
    )


@dataclass(frozen=True, slots=True)
class AnswerOptions(Options):
    """The answer file, and what is asked for each question."""

    model_id: str | None = option(None, "name of the run in answers and tables (default: made up)")
    answer_file: str | None = option(
        None, "JSONL file of answers (default: data/BENCH/model_answer/MODEL_ID.jsonl)"
    )
    resume: bool = option(False, "continue an existing answer file (the default)")
    overwrite: bool = option(False, "start again instead of continuing an answer file")
    num_choices: int = option(1, "answers to each question", least=1)
    batch_size: int = option(1, "questions answered at the same time, in shared passes", least=1)
    warmup: int = option(3, "unmeasured passes over the first question", least=0)
    conv_template: str = option(
        "auto",
        "auto: fastchat's for models it knows, else the tokenizer's; tokenizer; a fastchat name",
    )
    prefix_cache: bool = option(
        False,
        "keep the KV caches of earlier texts: the turns of a conversation read what is new alone",
    )
    system_prompt: str | None = option(
        None, "system prompt of the questions that have no 'system' of their own", metavar="TEXT"
    )

    def _check(self) -> None:
        if self.resume and self.overwrite:
            raise ValueError("resume, overwrite: got both; leave one out")
        if self.model_id is not None and (
            not self.model_id or Path(self.model_id).name != self.model_id
        ):
            raise ValueError(f"model_id: got {self.model_id!r}; allowed: a name without '/'")
        if self.prefix_cache and self.batch_size > 1:
            raise ValueError("prefix_cache, batch_size: got both; leave one out")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """All options of a run, whatever the method; names are Spec-Bench's where it has the option."""

    model: ModelOptions = field(default_factory=ModelOptions)
    questions: QuestionOptions = field(default_factory=QuestionOptions)
    sampling: DecodingOptions = field(default_factory=DecodingOptions)
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    workers: WorkerOptions = field(default_factory=WorkerOptions)

    def __post_init__(self) -> None:
        num_total, num_per_model = self.workers.num_gpus_total, self.model.num_gpus_per_model
        if num_total % num_per_model:
            raise ValueError(
                f"num_gpus_total: got {num_total} with num_gpus_per_model {num_per_model}; "
                "allowed: a multiple of it"
            )
        if self.workers.num_workers and num_total > num_per_model:
            raise ValueError(
                "num_workers, num_gpus_total: got both; num_workers counts workers on CPU; leave one out"
            )
        if self.workers.state_order == "single" and not self.uses_ray:
            raise ValueError(
                "state_order: got single without workers, where it is so anyway; leave it out"
            )
        if self.answers.batch_size > 1 and self.uses_ray:
            raise ValueError(
                f"batch_size: got {self.answers.batch_size} with workers, each of which answers one question "
                "at a time; leave one out, or use --shard"
            )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> RunConfig:
        """Return a run with the given options, by their names.

        A `ValueError` or `UserError` if a value is not allowed, or values do not fit each other.
        """
        return cls(**{name: config_of(part, given) for name, part in PARTS.items()})

    def into(self, file: Path) -> RunConfig:
        """Return the run with this answer file, which names it."""
        name = file.name.removesuffix(".jsonl")
        return replace(self, answers=replace(self.answers, model_id=name, answer_file=str(file)))

    def options(self) -> dict[str, Any]:
        return {
            name: value for part in PARTS for name, value in asdict(getattr(self, part)).items()
        }

    @property
    def worker_count(self) -> int:
        """Number of models that answer side by side."""
        return self.workers.num_workers or (
            self.workers.num_gpus_total // self.model.num_gpus_per_model
        )

    @property
    def uses_ray(self) -> bool:
        """Whether questions are answered in other processes."""
        return self.worker_count > 1 or self.workers.ray_address is not None


# The classes of a run's options, in the order in which `--help` shows them.
PARTS: dict[str, Any] = {item.name: item.default_factory for item in fields(RunConfig)}
