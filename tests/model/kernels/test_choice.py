"""The choice of an attention by measurement: the fastest, ties to the usual one, failures said.

Run: pytest tests/model/kernels/test_choice.py
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import model.kernels.attention as attention_module
import model.kernels.measured_attention as module
from model.backends.target import TargetModel
from model.kernels.measured_attention import (
    FOLDED,
    KEYS,
    ROWS,
    Attend,
    LayerHeads,
    bucket,
    choice_on_gpu,
    folded_products,
    folded_sdpa,
    measured_choice,
)
from model.kernels.registered_attention import USUAL
from model.machine import timing
from tests.model.decoded import known, random_ids

HEADS = LayerHeads(num_heads=4, num_key_heads=2, key_size=8, value_size=8)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUNDS", 3)
    monkeypatch.setattr(module, "IN_A_ROW", 2)


def choose(candidates: dict[str, Attend], **options: Any) -> module.Choice:
    """Return the choice on the CPU."""
    given = {"synchronize": lambda: None, "dtype": torch.float32, **options}
    return measured_choice(candidates, HEADS, device=CPU, **given)


def clocked(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[str, int, int], float]) -> None:
    """Let calls take the seconds that a function of (candidate, queries, keys) says."""

    def seconds_of(call: Any, synchronize: Callable[[], object]) -> float:
        attend, inputs = call.args
        return seconds(attend.__name__, inputs.query.shape[2], inputs.key.shape[2])

    monkeypatch.setattr(module, "seconds_of", seconds_of)


def test_a_number_belongs_to_the_next_larger_size() -> None:
    found = [bucket(number, KEYS) for number in (1, 512, 513, 2048, 4096, 100_000)]
    assert found == [0, 0, 1, 2, 3, 3]


def test_the_fastest_is_chosen_by_queries_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(name: str, num_rows: int, num_keys: int) -> float:
        if name == folded_products.__name__:
            return 0.5 if num_rows == 1 else 2.0
        return 0.5 if num_keys > 1024 else 1.5

    clocked(monkeypatch, lambda name, *sizes: 1.0 if name == "usual" else seconds(name, *sizes))

    def usual(*given: Any) -> torch.Tensor:
        return folded_sdpa(*given)

    # Of two that are as fast, the first.
    found = choose({USUAL: usual, **FOLDED})
    assert found[0] == ("products", "products", "folded", "folded")
    assert found[1:] == ((USUAL, USUAL, "folded", "folded"),) * (len(ROWS) - 1)


@pytest.mark.parametrize(("seconds", "expected"), [(0.96, USUAL), (0.94, "folded"), (1.1, USUAL)])
def test_ties_go_to_the_usual_one(
    seconds: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usual(*given: Any) -> torch.Tensor:
        return folded_products(*given)

    clocked(monkeypatch, lambda name, *_: 1.0 if name == "usual" else seconds)
    found = choose({USUAL: usual, "folded": folded_sdpa})
    assert found == ((expected,) * len(KEYS),) * len(ROWS)


def test_time_is_that_of_the_clock_with_the_device_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    now = 0.0
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now))

    def slow(*given: Any) -> torch.Tensor:
        nonlocal now
        now += 0.01
        return folded_sdpa(*given)

    found = choose({USUAL: slow, "folded": folded_sdpa}, synchronize=lambda: waits.append(0))
    assert found[0][0] == "folded"
    assert len(waits) == 2 * (module.ROUNDS + 1) * 2 * len(ROWS) * len(KEYS)


def test_one_that_fails_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    def lacks(*given: Any) -> torch.Tensor:
        raise RuntimeError("no such operation\nand much more")

    def wrong(*given: Any) -> torch.Tensor:
        return 1.1 * folded_sdpa(*given)

    def broken(*given: Any) -> torch.Tensor:
        return torch.nan * folded_sdpa(*given)

    others = {"lacks": lacks, "wrong": wrong, "broken": broken}
    assert choose({USUAL: folded_sdpa, **others}) == ((USUAL,) * len(KEYS),) * len(ROWS)
    lines = caplog.messages
    assert [line.split(":")[0] for line in lines] == [
        f"attention {name} is not used on cpu" for name in others
    ]
    assert lines[0].endswith("RuntimeError: no such operation")
    assert "differ by 1.0e-01 (allowed: 3.8e-06)" in lines[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_candidates_work_and_take_no_random_numbers(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    state = torch.get_rng_state()
    found = choose({USUAL: folded_sdpa, "products": folded_products}, dtype=dtype)
    assert [len(names) for names in found] == [len(KEYS)] * len(ROWS)
    assert torch.equal(torch.get_rng_state(), state)
    assert not caplog.text


def test_it_is_measured_once_a_process_at_the_first_use_and_on_a_gpu_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[LayerHeads] = []

    def choice(heads: LayerHeads, *given: Any) -> module.Choice:
        asked.append(heads)
        return (("folded",) * len(KEYS),) * len(ROWS)

    monkeypatch.setattr(attention_module, "choice_on_gpu", choice)
    model = known("Llama, grouped heads").build()
    assert not asked and TargetModel(model).attention.name == USUAL
    assert not asked, "the CPU has its own rule"
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    target = TargetModel(model)
    assert not asked
    token_ids = torch.tensor(random_ids(4))
    with torch.inference_mode():
        for _ in range(2):
            target.read(token_ids, 0, target.new_cache(8), last_logits_only=True)
    assert asked == [HEADS]
    assert target.attention.name.startswith("measured-ffff")
    assert TargetModel(model, use_kernels=False).attention.name == USUAL
    assert asked == [HEADS]


def test_heads_that_are_not_shared_evenly_leave_nothing_to_choose() -> None:
    for heads in (HEADS._replace(num_heads=0), HEADS._replace(num_heads=5)):
        assert choice_on_gpu(heads, torch.float32, CPU, False) == ()


@pytest.mark.parametrize(("num_heads", "names"), [(4, {USUAL, *FOLDED}), (2, {USUAL, "products"})])
def test_folding_is_no_choice_without_groups(
    num_heads: int, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import model.kernels.measured_attention as measured

    seen: list[Any] = []
    monkeypatch.setattr(measured, "measured_choice", lambda *given: seen.append(given) or ())
    choice_on_gpu.__wrapped__(HEADS._replace(num_heads=num_heads), torch.float32, CPU, False)
    candidates = seen[0][0]
    assert candidates.keys() == names
    with torch.inference_mode():
        query, rows = torch.randn(1, num_heads, 5, 8), torch.randn(1, 2, 9, 8)
        given = (query, rows, rows, torch.zeros(1, 1, 5, 9), 0.5)
        first, *others = (attend(*given) for attend in candidates.values())
        for other in others:
            torch.testing.assert_close(other, first)
