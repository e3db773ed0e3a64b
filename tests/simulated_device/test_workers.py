"""Workers through Ray: each has GPUs of its own, as many as its model is spread over."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evaluation.inference.config import RunConfig, WorkerOptions
from evaluation.questions.questions import Question
from model.commands.model_options import ModelOptions

pytest.importorskip("ray", reason="workers need Ray")

from evaluation.inference import workers
from evaluation.inference.workers import answer_by_workers, cluster

NUM_GPUS = 4


def telling_worker(meeting: Path) -> type:
    """Return a worker without a model, which tells the GPUs that it sees.

    Made here, so that Ray sends its code and no process imports torch.

    Args:
        meeting: an empty folder; workers answer when both have been there.
    """

    class Telling:
        def __init__(self, number: int) -> None:
            self._number = number

        def load(self, *_: object) -> tuple[None, list[str]]:
            return None, []

        def answer(self, question: Any, _: object) -> SimpleNamespace:
            (meeting / str(self._number)).touch()
            while len(list(meeting.iterdir())) < 2:
                time.sleep(0.05)
            row = {"worker": self._number, "gpus": os.environ["CUDA_VISIBLE_DEVICES"]}
            return SimpleNamespace(row=SimpleNamespace(values=row), memory={})

    return Telling


def setup_for(num_total: int, num_per_model: int) -> Any:
    model = ModelOptions(device="cuda", num_gpus_per_model=num_per_model)
    return SimpleNamespace(
        run=RunConfig(model=model, workers=WorkerOptions(num_gpus_total=num_total)),
        model=SimpleNamespace(device=torch.device("cuda")),
        model_id="telling",
    )


@pytest.fixture(autouse=True)
def machine_with_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let Ray count GPUs that are not there."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(workers.ray, "init", partial(workers.ray.init, num_gpus=NUM_GPUS))
    monkeypatch.setattr(workers, "Worker", telling_worker(tmp_path))


def test_each_worker_sees_gpus_that_no_other_sees() -> None:
    num_per_model = 2
    setup = setup_for(2 * num_per_model, num_per_model)
    questions = [Question(number, "qa", ("hm",)) for number in range(2)]
    with cluster(setup):
        rows = [done.row.values for done in answer_by_workers(setup, questions, None)]
    assert [row["worker"] for row in sorted(rows, key=lambda row: row["worker"])] == [1, 2]
    seen = {row["worker"]: row["gpus"].split(",") for row in rows}
    assert {len(gpus) for gpus in seen.values()} == {num_per_model}
    all_gpus = [gpu for gpus in seen.values() for gpu in gpus]
    assert len(set(all_gpus)) == len(all_gpus)
