"""Who is asked what, under which conditions, into which file: runs that are checked before the weights load.

Loading takes long: a mistake in the question file, device, model config, tokenizer, template, matrix
or answer file is reported before it. The checks read in order: `check_asked`, then `prepare` for each participant.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from transformers import StopStringCriteria

from evaluation.answers.log import AnswerLog
from evaluation.answers.record import (
    SERVED,
    RunRecord,
    git_commit,
    model_fingerprint,
    recorded_options,
    sidecar_path,
)
from evaluation.inference.answering import Answerer, Asking
from evaluation.inference.client import Client
from evaluation.inference.config import QuestionOptions, RunConfig
from evaluation.questions.conversation import (
    Conversation,
    asked_ids,
    check_messages,
    check_system,
    choose_conversation,
)
from evaluation.questions.known import check_known
from evaluation.questions.questions import DATA_FOLDER, Question, load_questions, question_file_of
from model.api.prompts import stop_criterion
from model.backends.proofs.support import eos_ids_of
from model.backends.target import TargetModel
from model.budget.measure import use_fastest_threads
from model.commands.command_line import UserError, user_errors
from model.commands.files import file_hash, refuse_outputs
from model.commands.loading import (
    CheckedModel,
    check_model,
    choose_device,
    make_drafter,
    read_memory,
    refuse_gpus,
)
from model.commands.model_options import ModelOptions
from model.engine.drafter import Drafter
from model.kernels.registered_attention import sdpa_backends
from model.machine.hardware import device_name, machine_name
from model.machine.packages import versions
from model.methods import Method, words_of
from model.options import Options, chosen

Memory = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class OtherProgram:
    """What answers beside our methods: transformers, another engine or a server."""

    name: str
    option_names: tuple[str, ...] = ()  # the options of its own that may follow its name

    is_served: ClassVar[bool] = False
    obeys_grammars: ClassVar[bool] = False  # where it answers one text at a time

    def config(self, draft_model: str | None) -> Options:
        """Return its options; `draft_model` is for one that drafts with a model."""
        raise NotImplementedError

    def check(self, run: RunConfig, config: Any) -> None:
        """Refuse what it does not do, with these options of its own, by a `UserError`."""

    def circumstances(self) -> dict[str, Any]:
        """Return what the sidecar of its answers says instead."""
        return {}

    def answerer(self, plan: Plan, target: TargetModel | None) -> Answerer:
        """Return it ready to answer; `target` is the same model in our hands, if there is one."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Participant:
    """A participant of a comparison: a method, another program or a server, with its options."""

    words: str  # as it was named
    method: Method | OtherProgram
    config: Any
    # Whether it is the second run of the baseline: how far the two runs differ is the noise of the comparison.
    is_again: bool = False

    @property
    def label(self) -> str:
        """Its words as part of a file's name: "recycling-tree-version-2.2.2"."""
        words = f"{self.words}-again" if self.is_again else self.words
        return re.sub(r"[^\w.]+", "-", words).strip("-")

    @property
    def is_served(self) -> bool:
        """Whether a server answers."""
        return isinstance(self.method, OtherProgram) and self.method.is_served


class Asked(NamedTuple):
    """The questions of a run, and the model with its template; without these two where servers alone answer."""

    question_file: Path
    questions: Sequence[Question]
    model: CheckedModel | None = None
    conversation: Conversation | None = None


@dataclass(slots=True)
class Plan:
    """A participant's part of a run, checked as far as possible without the weights; may be sent to a worker."""

    participant: Participant
    run: RunConfig
    asked: Asked
    model_id: str
    log: AnswerLog
    start_memory: Memory = field(default_factory=dict)
    is_hot: bool = False  # whether the method keeps memory across questions
    is_unsaved: bool = False  # whether it keeps some that no file can hold
    threads: int | None = None  # CPU threads; None if the loaded model decides
    client: Client | None = None  # of a server

    @property
    def model(self) -> CheckedModel:
        assert self.asked.model is not None, "servers have their own"
        return self.asked.model

    @property
    def asking(self) -> Asking:
        """How questions are asked."""
        conversation = None if self.participant.is_served else self.asked.conversation
        choices, seed = self.run.answers.num_choices, self.run.sampling.seed
        return Asking(conversation, self.model_id, choices, seed)

    @property
    def remaining(self) -> list[Question]:
        """The questions that the answer file lacks."""
        return self.log.remaining(self.asked.questions)

    def memory(self) -> Memory | None:
        """Return the memory before the first question; None if every worker has a memory of its own.

        A `UserError` if earlier questions left some that could not be saved.
        """
        if self.is_unsaved and self.log.num_rows:
            raise UserError(
                f"cannot resume {self.log.file}: {self.participant.method.name} has a reset, and no memory that "
                "could be saved, so that its next answers would take other steps; give --overwrite, or write its "
                "memory and load_memory"
            )
        if self.run.uses_ray and not (self.is_hot and self.run.workers.state_order == "single"):
            return None
        return self.log.memory() if self.is_hot and self.log.num_rows else self.start_memory

    def eos_ids(self, target: TargetModel) -> frozenset[int]:
        assert self.asked.conversation is not None, "servers have their own"
        return eos_ids_of(target.model, self.model.tokenizer) | self.asked.conversation.stop_ids

    def stop_criterion(self) -> StopStringCriteria | None:
        """Return the criterion of the run's stop strings; None if there are none."""
        with user_errors():
            return stop_criterion(self.run.sampling.stop, self.model.tokenizer, "")

    def longest_text(self) -> int:
        """Return the most tokens that a question can grow to: its turns, and an answer to each."""
        conversation, limit = self.asked.conversation, self.run.sampling.max_new_tokens
        assert conversation is not None, "servers have their own"
        return max(
            len(asked_ids(conversation, question, len(question.turns) - 1, [])) + limit
            if question.messages
            else sum(
                len(conversation.prompt_ids([], turn, question.system)) + limit
                for turn in question.turns
            )
            for question in self.asked.questions
        )


def questions_asked(run: RunConfig) -> Asked:
    """Return the questions of a run in their order, without a model; a `UserError` if there are none."""
    asked = run.questions
    question_file = question_file_of(asked.bench_name, asked.question_file)
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
            f"shard: got {asked.shard}, which has none of the questions; give fewer shards"
        )
    return Asked(question_file, questions)


def check_asked(run: RunConfig) -> Asked:
    """Load the questions and check the model before the weights load."""
    asked, options = questions_asked(run), run.model
    model = check_run_model(run)
    conversation = choose_conversation(
        run.answers.conv_template, options.model_path, model.tokenizer
    )
    check_system(conversation, asked.questions, options.model_path)
    check_messages(conversation, asked.questions)
    check_known(asked.questions, model.tokenizer)
    questions = asked.questions
    if run.questions.prompt_tokens:
        questions = [
            one
            for one in questions
            if run.questions.has_length(len(asked_ids(conversation, one, 0, [])))
        ]
        if not questions:
            raise UserError(
                f"prompt_tokens: got {run.questions.prompt_tokens}, which none of {len(asked.questions)} questions "
                "has"
            )
    return Asked(asked.question_file, questions, model, conversation)


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


def prepare(
    asked: Asked,
    participant: Participant,
    run: RunConfig,
    load_matrix: str | None = None,
    save_matrix: str | None = None,
    circumstances: Mapping[str, Any] = MappingProxyType({}),
) -> Plan:
    """Check a participant's run before the weights load, reach a server, and lock the answer file.

    The memory begins with `load_matrix` and is saved to `save_matrix`; `circumstances` is further
    content of the sidecar.
    """
    client, model = None, asked.model
    _refuse_unknown(asked.questions, participant, run)
    memory: Memory = {}
    is_hot = is_unsaved = False
    if participant.is_served:
        client = Client(participant.config)
    else:
        assert model is not None, "a method needs a model"
        memory = read_memory(load_matrix, model.tokenizer)
        if isinstance(participant.method, Method) and model.vocab_size:
            drafter = _check_drafter(participant, run, model, memory, save_matrix is not None)
            is_hot, is_unsaved = drafter.is_hot, drafter.has_unsaved_memory
    model_id = run.answers.model_id or _run_name(participant, run, model)
    given = run.answers.answer_file
    if not given and not DATA_FOLDER.is_dir():  # as where the package is installed
        raise UserError(f"answer_file: got none, and there is no folder {DATA_FOLDER}; give one")
    shard = "-shard-" + run.questions.shard.replace("/", "-of-") if run.questions.shard else ""
    default = model_answers(run.questions) / f"{model_id}{shard}.jsonl"
    answer_file = Path(given).expanduser() if given else default
    saved, loaded = ([Path(file)] if file else [] for file in (save_matrix, load_matrix))
    # A run may load a matrix and save it into the same file.
    read = [asked.question_file, *(loaded if loaded != saved else [])]
    refuse_outputs([answer_file, sidecar_path(answer_file), *saved], read)
    threads = None if client else _known_threads(run, model, answer_file)
    sidecar = {
        "method": participant.method.name,
        "options": {"served_model": client.model} if client else asdict(participant.config),
        "model_id": model_id,
        **(_as_served(run, client) if client else _as_decoded(asked, run, load_matrix)),
        "question_file_sha256": file_hash(asked.question_file),
        "question_file_name": asked.question_file.name,
        "shard": run.questions.shard,
        "versions": versions(),
        "git_commit": git_commit(),
        "argv": sys.argv[1:],
        "start_time": time.time(),
        "end_time": None,
        **circumstances,
    }
    if threads:
        sidecar["threads"] = threads
    if ":" in participant.method.name:  # reports import no module that a file of answers names
        sidecar["method_title"] = words_of(participant.method.name).title
    if is_hot or is_unsaved:
        sidecar["keeps_memory"] = True
    log = AnswerLog(answer_file, sidecar, run.answers.overwrite)
    return Plan(participant, run, asked, model_id, log, memory, is_hot, is_unsaved, threads, client)


def _refuse_unknown(
    questions: Sequence[Question], participant: Participant, run: RunConfig
) -> None:
    """Refuse whoever leaves out what the run or its questions ask for, by a `UserError`."""
    method, answers = participant.method, run.answers
    if isinstance(method, Method):
        return
    obeys = method.is_served or (method.obeys_grammars and answers.batch_size == 1)
    if not obeys and any(question.fields for question in questions):
        raise UserError(
            f"method {method.name}: got questions with response_format or tool_choice, which it does not obey"
        )
    if answers.prefix_cache:
        raise UserError(f"prefix_cache: got it with {method.name}; allowed: for our methods alone")


def _as_decoded(asked: Asked, run: RunConfig, load_matrix: str | None) -> dict[str, Any]:
    """Return the conditions of answers that the model in our hands gives."""
    model, conversation = asked.model, asked.conversation
    assert model is not None and conversation is not None, "a method needs a model"
    return {
        **recorded_options(run.options()),
        "model_fingerprint": model_fingerprint(run.model.model_path, model.hf_config),
        "conv_template": conversation.name,
        "load_matrix": load_matrix,
        "num_workers": run.worker_count if run.uses_ray else None,
        "state_order": run.workers.state_order if run.uses_ray else None,
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": model.weights,
        "device": device_name(model.device),
        "machine": machine_name(),
        "sdpa_backends": sdpa_backends(model.device),
        "graphs": run.model.graphs if _takes_graphs(run.model, model.device) else None,
    }


def _as_served(run: RunConfig, client: Client) -> dict[str, Any]:
    """Return the conditions of a server's answers, of whose model and device nothing is known."""
    options = recorded_options(run.options())
    for decided_there in ("kernels", "weights"):
        options.pop(decided_there, None)
    return {
        **options,
        "model_path": client.model,
        SERVED: True,
        "load_matrix": None,
        "state_order": None,
    }


def _check_drafter(
    participant: Participant, run: RunConfig, model: CheckedModel, memory: Memory, is_saved: bool
) -> Drafter:
    """Check options, memory and model by making a drafter, which is returned."""
    # The run's device: a draft model loaded here is kept; workers load their own.
    device = torch.device("cpu") if run.uses_ray else model.device
    method, vocab_size = participant.method, model.vocab_size
    assert isinstance(method, Method) and vocab_size is not None
    drafter = make_drafter(method, participant.config, vocab_size, device, memory)
    with user_errors():
        drafter.check_config(model.hf_config.get_text_config(decoder=True))
    has_graphs = _takes_graphs(run.model, model.device) and run.model.graphs == "auto"
    if has_graphs and drafter.needs.probes:
        raise UserError(
            f"graphs: got auto with {method.name} on {model.device}, whose masks CUDA graphs do not read; give "
            "--graphs off"
        )
    if is_saved and not drafter.memory():
        raise UserError(
            f"save_matrix: {method.name} keeps nothing across prompts with these options; leave it out"
        )
    if run.answers.batch_size > 1 and drafter.needs.cold_start:
        raise UserError(
            f"batch_size: got {run.answers.batch_size} with a cold start, which clears the memory before each "
            "question while others still use it; allowed: 1; leave one of them out"
        )
    return drafter


def model_answers(questions: QuestionOptions) -> Path:
    return DATA_FOLDER / questions.bench_name / "model_answer"


def _known_threads(run: RunConfig, model: CheckedModel | None, answer_file: Path) -> int | None:
    """Return the run's CPU threads, None if the loaded model decides them.

    A resumed run goes on with the threads of its first answers.
    """
    given, is_resumed = run.model.threads, not run.answers.overwrite and answer_file.exists()
    found = RunRecord.read(answer_file).threads if is_resumed and given is None else None
    if found:
        torch.set_num_threads(found)
        return found
    current = torch.get_num_threads()
    is_fixed = run.uses_ray or (model is not None and model.device.type != "cpu")
    return current if given or is_fixed or current == 1 else None


def settle_threads(plans: Sequence[Plan], target: TargetModel) -> None:
    """Let the loaded model decide the CPU threads if nothing else has, such as earlier answers."""
    known = sorted({plan.threads for plan in plans if plan.threads})
    if len(known) > 1:
        raise UserError(
            f"threads: earlier answers were made with {' and '.join(map(str, known))} threads; give --overwrite"
        )
    if not known:
        print(f"{use_fastest_threads(target)}; --threads sets it", file=sys.stderr)
    for plan in plans:
        plan.threads = torch.get_num_threads()
        plan.log.note(threads=plan.threads)


def _takes_graphs(options: ModelOptions, device: torch.device) -> bool:
    """Whether the option `graphs` has an effect."""
    return device.type == "cuda" and options.num_gpus_per_model == 1


def _run_name(participant: Participant, run: RunConfig, model: CheckedModel | None) -> str:
    """Return the run's name: model, method, changed options, dtype, temperature."""
    changed = [
        f"{name.replace('_', '-')}-{Path(str(value)).name.removesuffix('.json')}"
        for name, value in chosen(participant.config).items()
    ]
    changed += [f"batch-{run.answers.batch_size}"] * (run.answers.batch_size > 1)
    changed += [f"shuffle-{run.questions.shuffle}"] * (run.questions.shuffle is not None)
    changed += [str(model.dtype).removeprefix("torch.")] if model else []
    folder = Path(run.model.model_path).resolve().name
    return "-".join([folder, participant.method.name, *changed, f"temp-{run.sampling.temperature}"])
