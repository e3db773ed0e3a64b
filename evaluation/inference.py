"""One inference run: check everything, load, answer, report.

The order matters: question file, device, model config, tokenizer, template, matrix and answer file
are checked before the weights load, since loading is what takes long and a mistake found after it
is a mistake paid for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from evaluation.answers import AnswerLog
from evaluation.conversation import Conversation, choose_conversation
from evaluation.eval import Turn, answer_questions
from evaluation.loading import (
    choose_device,
    choose_dtype,
    eos_ids_of,
    load_config_and_tokenizer,
    load_target,
)
from evaluation.memory_file import check_folder_of, make_drafter, read_memory, save_memory
from evaluation.provenance import device_name, git_commit, model_fingerprint, versions
from evaluation.questions import DATA_FOLDER, Question, load_questions, question_file_of
from evaluation.run_config import RunConfig
from model.decoding import generate
from model.drafter import Drafter
from model.hf import TargetModel, sampling_processors
from model.verification import SamplingRule

# The options that make a run what it is, beside the method's own.
RECORDED = (
    "model_path",
    "bench_name",
    "question_begin",
    "question_end",
    "max_new_tokens",
    "num_choices",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "warmup",
)


class MethodAnswerer:
    """A drafter on a target model, as an `Answerer`."""

    def __init__(
        self, target: TargetModel, drafter: Drafter, run: RunConfig, eos_ids: frozenset[int]
    ) -> None:
        self.target = target
        self.drafter = drafter
        self._max_new_tokens = run.max_new_tokens
        self._eos_ids = eos_ids
        self._rule = None
        self._generator = torch.Generator(device=target.device)
        if run.temperature > 0:
            processors = sampling_processors(run.temperature, run.top_k, run.top_p)
            self._rule = SamplingRule(processors, self._generator)

    def seed(self, seed: int) -> None:
        """Begin a choice with a known stream of random numbers."""
        self._generator.manual_seed(seed)

    def begin_question(self) -> None:
        """Forget what came before, if the method starts cold."""
        if self.drafter.is_cold:
            self.drafter.reset()

    def answer(self, prompt_ids: list[int]) -> Turn:
        """Answer one prompt."""
        start = time.perf_counter()
        generation = generate(
            self.target,
            self.drafter,
            prompt_ids,
            max_new_tokens=self._max_new_tokens,
            eos_ids=self._eos_ids,
            rule=self._rule,
        )
        wall_time = time.perf_counter() - start
        prefill_time = generation.steps[0].prefill_ns / 1e9
        details = {
            "prompt_tokens": len(prompt_ids),
            "prefill_time": prefill_time,
            "decode_time": wall_time - prefill_time,
            "draft_tokens": sum(step.num_nodes - 1 for step in generation.steps),
            "stop_reasons": generation.steps[-1].stop_reason,
        }
        return Turn(generation.token_ids, generation.accept_lengths, wall_time, details)

    def end_warmup(self) -> None:
        """Forget the warm-up, unless the method counts it."""
        if not self.drafter.keeps_warmup:
            self.drafter.reset()

    def memory(self) -> dict[str, torch.Tensor]:
        """Return what lives across questions."""
        return self.drafter.memory() if self.drafter.is_hot else {}


@dataclass(slots=True)
class Plan:
    """A run that has been checked: what can be known without the weights is right."""

    method: str
    run: RunConfig
    config: Any
    questions: list[Question]
    device: torch.device
    dtype: torch.dtype
    hf_config: Any
    tokenizer: Any
    conversation: Conversation
    start_memory: dict[str, torch.Tensor]
    is_hot: bool
    model_id: str
    log: AnswerLog

    @property
    def is_answered(self) -> bool:
        """Whether the answer file has every question already."""
        return all(question.question_id in self.log.done for question in self.questions)


def answer_with_method(
    method: str, run: RunConfig, config: Any, load_matrix: str | None, save_matrix: str | None
) -> int:
    """Answer a benchmark's questions with a method.

    Returns:
        0, or 1 if a question failed.

    Raises:
        UserError: if something given cannot be used.
    """
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # noise in a log; ours shows the run
    check_folder_of(save_matrix)
    plan = prepare(method, run, config, load_matrix)
    try:
        if save_matrix or not plan.is_answered:
            if plan.is_hot and plan.log.num_rows:
                plan.log.memory()  # before the weights load: it may be missing
            target = load_target(run, plan.hf_config, plan.dtype, plan.device)
            drafter = make_drafter(
                method, config, target.vocab_size, target.device, plan.start_memory
            )
            for note in _notes(target, drafter):
                print(note, file=sys.stderr)
            _answer(plan, target, drafter)
            if save_matrix:
                save_memory(drafter, Path(save_matrix))
            plan.log.finish()
    finally:
        plan.log.close()
    num_failed = plan.log.num_failed
    failed = (
        f"; {num_failed} failed, with their cause (--overwrite runs all again)"
        if num_failed
        else ""
    )
    print(f"{plan.log.num_rows} answers in {plan.log.file}{failed}")
    return 1 if num_failed else 0


def prepare(method: str, run: RunConfig, config: Any, load_matrix: str | None) -> Plan:
    """Check all that can be known before the weights load; the answer file is locked from here on.

    Raises:
        UserError: if something given cannot be used.
    """
    question_file = (
        Path(run.question_file) if run.question_file else question_file_of(run.bench_name)
    )
    questions = load_questions(question_file, run.question_begin, run.question_end)
    device = choose_device(run)
    dtype = choose_dtype(run, device)
    if run.threads:
        torch.set_num_threads(run.threads)
    hf_config, tokenizer = load_config_and_tokenizer(run.model_path)
    conversation = choose_conversation(run.conv_template, run.model_path, tokenizer)
    memory = read_memory(load_matrix)
    vocab_size = getattr(hf_config.get_text_config(decoder=True), "vocab_size", None)
    is_hot = False
    if vocab_size:
        is_hot = make_drafter(method, config, vocab_size, torch.device("cpu"), memory).is_hot
    model_name = Path(run.model_path).resolve().name
    model_id = run.model_id or f"{model_name}-{_run_name(method, config, run, dtype)}"
    default_file = DATA_FOLDER / run.bench_name / "model_answer" / f"{model_id}.jsonl"
    answer_file = Path(run.answer_file).expanduser() if run.answer_file else default_file
    meta = {
        "method": method,
        "options": dataclasses.asdict(config),
        "model_id": model_id,
        **{name: getattr(run, name) for name in RECORDED},
        "model_fingerprint": model_fingerprint(
            run.model_path, getattr(hf_config, "_commit_hash", None)
        ),
        "conv_template": conversation.name,
        "question_file_sha256": hashlib.sha256(question_file.read_bytes()).hexdigest(),
        "load_matrix": load_matrix,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "git_commit": git_commit(),
        "argv": sys.argv[1:],
        "start_time": time.time(),
        "end_time": None,
    }
    log = AnswerLog(answer_file, meta, run.overwrite)
    return Plan(
        method,
        run,
        config,
        questions,
        device,
        dtype,
        hf_config,
        tokenizer,
        conversation,
        memory,
        is_hot,
        model_id,
        log,
    )


def _answer(plan: Plan, target: TargetModel, drafter: Drafter) -> None:
    """Answer what the log lacks."""
    log, run = plan.log, plan.run

    def restore() -> None:
        if log.num_rows and drafter.is_hot:
            drafter.load_memory(log.memory())
        elif plan.start_memory:
            drafter.load_memory(plan.start_memory)

    log.begin()
    answer_questions(
        MethodAnswerer(
            target, drafter, run, eos_ids_of(target, plan.tokenizer) | plan.conversation.stop_ids
        ),
        plan.conversation,
        plan.questions,
        log,
        model_id=plan.model_id,
        num_choices=run.num_choices,
        seed=run.seed,
        num_warmup=run.warmup,
        restore=restore,
    )


def _notes(target: TargetModel, drafter: Drafter) -> list[str]:
    """Return what a reader of the log should know about this run."""
    chain = f"chain drafts only: {target.chain_reason}" if target.chain_only else ""
    return [note for note in (drafter.describe(), chain) if note]


def _run_name(method: str, config: Any, run: RunConfig, dtype: torch.dtype) -> str:
    """Return what tells this run from others of the same model: method, changed options, dtype,
    temperature.
    """
    changed = [
        f"{item.name.replace('_', '-')}-{Path(str(value)).name.removesuffix('.json')}"
        for item in dataclasses.fields(config)
        if (value := getattr(config, item.name)) != item.default
    ]
    return "-".join(
        [method, *changed, str(dtype).removeprefix("torch."), f"temp-{run.temperature}"]
    )
