"""The number of CPU threads is what a pass measured fastest with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from model.backends.target import TargetModel
from model.budget import measure
from model.budget.measure import choose, numbers_to_try, use_fastest_threads

DEMO_MODEL = Path(__file__).resolve().parents[3] / "data" / "demo" / "model"


@pytest.fixture(scope="module")
def target() -> TargetModel:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    return TargetModel(model.eval())


@pytest.fixture
def num_threads() -> list[int]:
    """Let torch have this number of threads, as far as anybody asks; the last one is set."""
    return [8]


@pytest.fixture(autouse=True)
def no_real_threads(num_threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", num_threads.append)


@pytest.mark.parametrize(("most", "tried"), [(1, [1]), (2, [1, 2]), (3, [1, 3]), (64, [1, 32, 64])])
def test_one_half_and_all_are_tried(most: int, tried: list[int]) -> None:
    assert numbers_to_try(most) == tried


@pytest.mark.parametrize(
    ("milliseconds", "expected"),
    [
        ({1: 27.0, 2: 728.0}, 1),  # beside other work
        ({1: 30.0, 2: 16.0}, 2),
        ({1: 10.0, 2: 10.5}, 2),  # too close to be told apart
        ({1: 9.0, 8: 2.0, 16: 3.0}, 8),
    ],
)
def test_fewer_threads_must_be_clearly_faster(
    milliseconds: dict[int, float], expected: int
) -> None:
    assert choose(milliseconds) == expected


@pytest.mark.parametrize("fastest", [1, 4, 8])
def test_the_fastest_number_is_set_and_said(
    fastest: int, target: TargetModel, num_threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def milliseconds(*_: object) -> float:
        return 200.0 if num_threads[-1] == fastest else 400.0

    monkeypatch.setattr(measure, "time_pass", milliseconds)
    choice = use_fastest_threads(target)
    assert num_threads[-1] == fastest
    assert choice.startswith(f"threads: {fastest} (a pass of 8 nodes takes ")
    assert f"200.0 ms with {fastest}" in choice
    assert set(num_threads) == {1, 4, 8}


def test_a_slow_model_is_timed_for_three_seconds_at_most(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def slow_pass(*_: object) -> float:
        clock[0] += 0.9
        return 900.0

    monkeypatch.setattr(measure, "time_pass", slow_pass)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    use_fastest_threads(target)
    assert clock[0] <= 6 * 0.9, "one round of three numbers, each woken first, and no more"


def test_with_one_thread_there_is_nothing_to_choose(
    target: TargetModel, num_threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_threads[:] = [1]
    monkeypatch.setattr(measure, "time_pass", lambda *_: pytest.fail("nothing is to be timed"))
    assert use_fastest_threads(target) == ""
    assert num_threads == [1]
