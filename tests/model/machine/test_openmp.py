"""A thread gives OpenMP's threads back after a text and after the self-test, and gets others when it computes on.

Run: pytest tests/model/machine/test_openmp.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from model import SpeculativeDecoder
from model.api import permits
from model.backends.proofs import self_test
from model.backends.target import TargetModel
from model.machine import hardware
from tests.hang import wait_for
from tests.model.decoded import known


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.usefixtures("three_threads")
@pytest.mark.skipif(hardware._pause() is None, reason="torch has another runtime here")
def test_a_pool_ends_and_comes_back() -> None:
    def compute() -> float:
        torch.set_num_threads(3)
        return float(torch.ones(3_000_000).sum())

    with ThreadPoolExecutor(1) as executor:
        executor.submit(int).result()  # its thread is there
        alone = num_threads()
        for _ in range(2):
            assert executor.submit(compute).result() == 3_000_000
            assert num_threads() == alone + 2
            executor.submit(hardware.give_back_threads).result()
            wait_for(lambda: num_threads() == alone, "a thread stays")


def test_texts_and_the_self_test_give_threads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(permits, "give_back_threads", lambda: given.append("text"))
    monkeypatch.setattr(self_test, "give_back_threads", lambda: given.append("test"))
    target = TargetModel(known("Llama, grouped heads").build())
    self_test.self_test(target)
    assert given == ["test"]
    decoder = SpeculativeDecoder(target, None, "recycling")
    given.clear()
    decoder.generate([1, 2, 3], max_new_tokens=4)
    assert given == ["text"]
    for _ in decoder.stream([1, 2, 3], max_new_tokens=4):
        pass
    assert given == ["text"] * 2


def test_without_the_runtime_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware.sys, "platform", "darwin")
    assert hardware._pause.__wrapped__() is None
