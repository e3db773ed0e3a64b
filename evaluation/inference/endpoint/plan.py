"""A server's part of a run, checked before the first question: the server is there, its answer file is locked."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from evaluation.answers.log import AnswerLog
from evaluation.answers.provenance import git_commit
from evaluation.answers.record import SERVED, recorded_options
from evaluation.answers.row import AnswerRow
from evaluation.inference.config import RunConfig
from evaluation.inference.endpoint.answers import EndpointAnswerer
from evaluation.inference.endpoint.client import Client
from evaluation.inference.endpoint.config import EndpointConfig
from evaluation.questions.questions import Question
from model.commands.command_line import UserError
from model.commands.files import file_hash, refuse_outputs
from model.machine.packages import versions

# Options of a run that a server decides itself, or that ask for nothing there.
NOT_SENT = ("kernels", "weights")


@dataclass(slots=True)
class EndpointPlan:
    """A server that was reached, with the questions and the answer file of a run."""

    client: Client
    run: RunConfig
    questions: Sequence[Question]
    model_id: str
    log: AnswerLog

    @property
    def is_answered(self) -> bool:
        """Whether the answer file has every question already."""
        return not self.log.remaining(self.questions)

    def ready(self, in_parts: bool) -> tuple[EndpointAnswerer, Iterator[AnswerRow]]:
        """Return the server after warm-up, and its rows to come; its file is begun."""
        answers = self.run.answers
        answerer = EndpointAnswerer(
            self.client, self.run.sampling, self.model_id, answers.num_choices, answers.batch_size
        )
        remaining = self.log.remaining(self.questions)
        answerer.warm_up(remaining[0], answers.warmup)
        if not self.client.gives_token_ids:
            print(f"{self.client.url} gives no token ids: texts are compared", file=sys.stderr)
        self.log.begin()
        return answerer, answerer.rows(remaining, in_parts)


def prepare_endpoint(
    config: EndpointConfig,
    run: RunConfig,
    questions: Sequence[Question],
    question_file: Path,
    answer_file: Path,
    circumstances: Mapping[str, Any] = MappingProxyType({}),
) -> EndpointPlan:
    """Reach a server, and lock its answer file; `circumstances` is further content of the sidecar.

    Raises:
        UserError: if the server cannot be reached, or the file cannot be written.
    """
    if run.uses_ray:
        raise UserError("num_workers: got workers with an endpoint; give --batch-size instead")
    client = Client(config)
    refuse_outputs([answer_file], [question_file])
    options = recorded_options(run.options())
    sidecar = {
        "method": config.base_url,
        "options": {"served_model": client.model},
        "model_id": answer_file.stem,
        **{key: value for key, value in options.items() if key not in NOT_SENT},
        "model_path": client.model,
        SERVED: True,
        "question_file_sha256": file_hash(question_file),
        "question_file_name": question_file.name,
        "shard": run.questions.shard,
        "load_matrix": None,
        "state_order": None,
        "versions": versions(),
        "git_commit": git_commit(),
        "argv": sys.argv[1:],
        "start_time": time.time(),
        "end_time": None,
        **circumstances,
    }
    log = AnswerLog(answer_file, sidecar, run.answers.overwrite)
    return EndpointPlan(client, run, questions, answer_file.stem, log)
