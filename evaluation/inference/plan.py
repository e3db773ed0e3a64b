"""A run checked before the weights load: questions, model, method, answer file.

Loading takes long: a mistake in the question file, device, model config, tokenizer, template, matrix
or answer file is reported before it.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from evaluation.answers.log import AnswerLog
from evaluation.answers.provenance import git_commit, model_fingerprint
from evaluation.answers.record import RunRecord, recorded_options, sidecar_path
from evaluation.inference.config import QuestionOptions, RunConfig
from evaluation.inference.method import Setup
from evaluation.inference.method_batch import check_batch_size
from evaluation.inference.referees import Referee
from evaluation.questions.conversation import (
    Conversation,
    asked_ids,
    check_messages,
    check_system,
    choose_conversation,
)
from evaluation.questions.questions import DATA_FOLDER, Question, load_questions, question_file_of
from model.budget.threads import use_fastest_threads
from model.commands.command_line import UserError, user_errors
from model.commands.files import file_hash, refuse_outputs
from model.commands.loading import CheckedModel, check_model, choose_device, refuse_gpus
from model.commands.matrix_file import make_drafter, read_memory
from model.commands.model_options import ModelOptions
from model.engine.drafter import Drafter
from model.engine.target import TargetModel
from model.kernels.sdpa import sdpa_backends
from model.machine.hardware import device_name
from model.machine.packages import versions
from model.methods import Method
from model.options import chosen


class Asked(NamedTuple):
    """The questions of a run and its model; nothing in it depends on a method."""

    question_file: Path
    questions: Sequence[Question]
    model: CheckedModel
    conversation: Conversation
    model_name: str


@dataclass(slots=True)
class Plan:
    """A run that has been checked as far as is possible without the weights."""

    setup: Setup
    questions: Sequence[Question]
    is_hot: bool  # whether the method keeps memory across questions
    log: AnswerLog
    threads: int | None  # CPU threads; None if the loaded model decides

    @property
    def is_answered(self) -> bool:
        """Whether the answer file has every question already."""
        return not self.log.remaining(self.questions)

    def settle_threads(self, target: TargetModel) -> None:
        """Let the loaded model decide the CPU threads if nothing else has."""
        if self.threads is None:
            choice = use_fastest_threads(target)
            print(f"{choice}; --threads sets it", file=sys.stderr)
            self.note_threads()

    def note_threads(self) -> None:
        self.threads = torch.get_num_threads()
        self.log.note(threads=self.threads)

    def note_kernels(self, target: TargetModel) -> None:
        """Write the kernels of the model's passes into the sidecar; a referee uses none."""
        self.log.note(lacks_kernels=target.lacks_kernels)
        if isinstance(self.setup.method, Method):
            self.log.note(kernel_names=target.kernel_names)

    def memory(self) -> dict[str, torch.Tensor] | None:
        """Return the memory before the first question; None if every worker has a memory of its own.

        Raises:
            UserError: if questions were answered and their memory is missing.
        """
        run = self.setup.run
        if run.uses_ray and not (self.is_hot and run.workers.state_order == "single"):
            return None
        return self.log.memory() if self.is_hot and self.log.num_rows else self.setup.start_memory


def check_asked(run: RunConfig) -> Asked:
    """Load the questions and check the model before the weights load."""
    question_file, questions = asked_questions(run)
    model = check_run_model(run)
    conversation = choose_conversation(
        run.answers.conv_template, run.model.model_path, model.tokenizer
    )
    check_system(conversation, questions, run.model.model_path)
    check_messages(conversation, questions)
    if run.questions.prompt_tokens:
        asked = [
            one
            for one in questions
            if run.questions.has_length(len(asked_ids(conversation, one, 0, [])))
        ]
        if not asked:
            raise UserError(
                f"prompt_tokens: got {run.questions.prompt_tokens}, which none of {len(questions)} questions has"
            )
        questions = asked
    model_name = Path(run.model.model_path).resolve().name
    return Asked(question_file, questions, model, conversation, model_name)


def asked_questions(run: RunConfig) -> tuple[Path, Sequence[Question]]:
    """Return the question file of a run, and the questions that it asks, in their order.

    Raises:
        UserError: if there are none.
    """
    question_file = question_file_of(run.questions.bench_name, run.questions.question_file)
    asked = run.questions
    selected = load_questions(
        question_file,
        asked.question_begin,
        asked.question_end,
        asked.num_questions,
        run.answers.system_prompt,
        asked.category_map,
    )
    questions = asked.part_of(asked.in_order(selected))
    if not questions:
        raise UserError(
            f"shard: got {run.questions.shard}, which has none of the questions; give fewer shards"
        )
    return question_file, questions


def prepare(
    asked: Asked,
    method: Method | Referee,
    run: RunConfig,
    config: Any,
    load_matrix: str | None = None,
    save_matrix: str | None = None,
    circumstances: Mapping[str, Any] = MappingProxyType({}),
) -> Plan:
    """Check a method's run before the weights load, and lock its answer file.

    The memory begins with `load_matrix` and is saved to `save_matrix`; `circumstances` is further
    content of the sidecar.
    """
    memory = read_memory(load_matrix, asked.model.tokenizer)
    is_hot = False
    if isinstance(method, Method) and asked.model.vocab_size:
        # The run's device: a draft model loaded here is kept; workers load their own.
        device = torch.device("cpu") if run.uses_ray else asked.model.device
        # Making a drafter checks options, memory and model.
        drafter = make_drafter(method, config, asked.model.vocab_size, device, memory)
        with user_errors():
            drafter.check_config(asked.model.hf_config.get_text_config(decoder=True))
        _check_drafter(method.name, drafter, run.model, asked.model.device, save_matrix is not None)
        check_batch_size(run.answers.batch_size, drafter)
        is_hot = drafter.is_hot
    run_name = _run_name(method.name, config, run, asked.model.dtype)
    model_id = run.answers.model_id or f"{asked.model_name}-{run_name}"
    given = run.answers.answer_file
    answer_file = Path(given).expanduser() if given else _default_file(run.questions, model_id)
    saved, loaded = ([Path(file)] if file else [] for file in (save_matrix, load_matrix))
    # A run may load a matrix and save it into the same file.
    read = [asked.question_file, *(loaded if loaded != saved else [])]
    refuse_outputs([answer_file, sidecar_path(answer_file), *saved], read)
    longest = 0
    if isinstance(method, Referee) and method.needs_longest_text:
        longest = _longest_text(asked.questions, asked.conversation, run.sampling.max_new_tokens)
    setup = Setup(method, run, config, asked.model, asked.conversation, memory, model_id, longest)
    is_fixed = run.uses_ray or asked.model.device.type != "cpu"
    resumed = answer_file if not run.answers.overwrite and answer_file.exists() else None
    threads = _known_threads(run.model.threads, is_fixed, resumed)
    sidecar = {**_sidecar(setup, asked.question_file, load_matrix), **circumstances}
    if threads:
        sidecar["threads"] = threads
    log = AnswerLog(answer_file, sidecar, run.answers.overwrite)
    return Plan(setup, asked.questions, is_hot, log, threads)


def _check_drafter(
    name: str, drafter: Drafter, options: ModelOptions, device: torch.device, is_saved: bool
) -> None:
    if _takes_graphs(options, device) and options.graphs == "auto" and drafter.needs.probes:
        raise UserError(
            f"graphs: got auto with {name} on {device}, whose masks CUDA graphs do not read; give --graphs off"
        )
    if is_saved and not drafter.memory():
        raise UserError(
            f"save_matrix: {name} keeps nothing across prompts with these options; leave it out"
        )


def model_answers(questions: QuestionOptions) -> Path:
    return DATA_FOLDER / questions.bench_name / "model_answer"


def _default_file(questions: QuestionOptions, model_id: str) -> Path:
    if not DATA_FOLDER.is_dir():  # as where the package is installed
        raise UserError(f"answer_file: got none, and there is no folder {DATA_FOLDER}; give one")
    shard = "-shard-" + questions.shard.replace("/", "-of-") if questions.shard else ""
    return model_answers(questions) / f"{model_id}{shard}.jsonl"


def _known_threads(given: int | None, is_fixed: bool, resumed: Path | None) -> int | None:
    """Return the run's CPU threads, None if the loaded model decides them.

    A resumed run goes on with the threads of its first answers.
    """
    found = RunRecord.read(resumed).threads if resumed and given is None else None
    if found:
        torch.set_num_threads(found)
        return found
    current = torch.get_num_threads()
    return current if given or is_fixed or current == 1 else None


def check_run_model(run: RunConfig) -> CheckedModel:
    """Check a run's model, device and workers before the weights load."""
    workers, device = run.workers, choose_device(run.model)
    if device.type == "cpu" and workers.num_gpus_total > 1:
        refuse_gpus("num_gpus_total", workers.num_gpus_total)
    if device.type != "cpu" and workers.num_workers:
        raise UserError(
            f"num_workers: got {workers.num_workers} on {device}; allowed: with --device cpu; "
            "on GPUs give --num-gpus-total"
        )
    if run.uses_ray and find_spec("ray") is None:
        raise UserError("workers need Ray, which is not installed; pip install 'ray>=2.40'")
    if run.uses_ray and device.index is not None:
        raise UserError(
            f"device: got {device} with workers, but Ray chooses each worker's device; give --device {device.type}"
        )
    return check_model(run.model, workers.num_workers, workers.ray_address is not None)


def _takes_graphs(options: ModelOptions, device: torch.device) -> bool:
    """Whether the option `graphs` has an effect."""
    return device.type == "cuda" and options.num_gpus_per_model == 1


def _sidecar(setup: Setup, question_file: Path, load_matrix: str | None) -> dict[str, Any]:
    run, model = setup.run, setup.model
    return {
        "method": setup.method.name,
        "options": dataclasses.asdict(setup.config),
        "model_id": setup.model_id,
        **recorded_options(run.options()),
        "model_fingerprint": model_fingerprint(run.model.model_path, model.hf_config),
        "conv_template": setup.conversation.name,
        "question_file_sha256": file_hash(question_file),
        "question_file_name": question_file.name,
        "load_matrix": load_matrix,
        "shard": run.questions.shard,
        "num_workers": run.worker_count if run.uses_ray else None,
        "state_order": run.workers.state_order if run.uses_ray else None,
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": model.weights,
        "device": device_name(model.device),
        "sdpa_backends": sdpa_backends(model.device),
        "graphs": run.model.graphs if _takes_graphs(run.model, model.device) else None,
        "versions": versions(),
        "git_commit": git_commit(),
        "argv": sys.argv[1:],
        "start_time": time.time(),
        "end_time": None,
    }


def _longest_text(
    questions: Sequence[Question], conversation: Conversation, max_new_tokens: int
) -> int:
    """Return the most tokens that a question can grow to: its turns, and an answer to each."""
    return max(
        len(conversation.message_ids(question, len(question.turns) - 1)) + max_new_tokens
        if question.messages
        else sum(
            len(conversation.prompt_ids([], turn, question.system)) + max_new_tokens
            for turn in question.turns
        )
        for question in questions
    )


def _run_name(method: str, config: Any, run: RunConfig, dtype: torch.dtype) -> str:
    """Return the run's name among those of its model: method, changed options, dtype, temperature."""
    changed = [
        f"{name.replace('_', '-')}-{Path(str(value)).name.removesuffix('.json')}"
        for name, value in chosen(config).items()
    ]
    changed += [f"batch-{run.answers.batch_size}"] * (run.answers.batch_size > 1)
    changed += [f"shuffle-{run.questions.shuffle}"] * (run.questions.shuffle is not None)
    return "-".join(
        [method, *changed, str(dtype).removeprefix("torch."), f"temp-{run.sampling.temperature}"]
    )
