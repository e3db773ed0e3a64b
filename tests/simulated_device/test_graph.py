"""Graphs of simulated GPUs: a capture runs nothing, a replay runs its kernels where they were, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.simulated_device.device import SimulatedCuda
from tests.simulated_device.double.accounts import Accounts
from tests.simulated_device.double.errors import CaptureError, HostRace

HERE = "tests/simulated_device/test_graph.py"


@pytest.fixture(autouse=True)
def accounts(gpu: SimulatedCuda) -> Iterator[Accounts]:
    """The accounts of a test that runs on simulated GPUs."""
    with gpu:
        gpu.accounts.clear()
        yield gpu.accounts


def captured(
    function: Callable[[], torch.Tensor], pool: object = None
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Return a graph of a function, and where its result will be."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = function()
    return graph, result


def test_a_capture_runs_nothing_and_a_replay_runs_once() -> None:
    row = torch.zeros(2, device="cuda")
    graph, result = captured(lambda: row.add_(1) * 10)
    assert row.tolist() == [0, 0]
    assert result.isnan().all(), "a result has no numbers before a replay"
    for count in (1, 2, 3):
        graph.replay()
        assert row.tolist() == [count, count]
        assert result.tolist() == [10 * count, 10 * count]


def test_views_of_older_memory_are_written_back_too() -> None:
    rows = torch.zeros(4, 3, device="cuda")
    index = torch.tensor([2], device="cuda")

    def step() -> torch.Tensor:
        rows[1:3, :2].fill_(5)
        rows.index_copy_(0, index, torch.ones(1, 3, device="cuda"))
        return rows.sum()

    graph, total = captured(step)
    assert not rows.any()
    graph.replay()
    assert rows.tolist() == [[0, 0, 0], [5, 5, 0], [1, 1, 1], [0, 0, 0]]
    assert total.item() == 13


def test_a_replay_reads_the_memory_of_the_capture_and_the_numbers_of_the_host_then() -> None:
    row, number = torch.ones(2, device="cuda"), [3]
    graph, result = captured(lambda: row * number[0])
    number[0] = 100
    row.fill_(2)
    graph.replay()
    assert result.tolist() == [6, 6], "the host's number is that of the capture"
    row = row.clone().fill_(7)
    graph.replay()
    assert result.tolist() == [6, 6], "a tensor at another address is not seen"


def test_a_replay_is_one_launch_and_its_kernels_are_known(accounts: Accounts) -> None:
    row = torch.ones(2, device="cuda")
    accounts.clear()
    graph, _ = captured(lambda: row.view(1, 2).add(1).mul(2))
    assert not accounts.launches
    assert graph.num_kernels == 2  # type: ignore[attr-defined]
    graph.replay()
    assert accounts.launches == {"graph replay": 1}
    assert accounts.num_kernels == 2
    row.add_(1)
    assert (accounts.num_launches, accounts.num_kernels) == (2, 3)


REFUSED = {
    "item": lambda row: row.sum().item(),
    "branch": lambda row: row if row.any() else row + 1,
    "copy to the host": lambda row: row.cpu(),
    "copy from the host": lambda row: row + torch.tensor([1.0, 2.0], device="cuda"),
    "pageable memory": lambda row: row.copy_(torch.ones(2), non_blocking=True),
    "index of the host": lambda row: row[torch.tensor([0])],
    "mask": lambda row: row[row > 0],
    "synchronize": lambda row: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_waits_cannot_be_captured_and_leaves_all_as_it_was(case: str) -> None:
    row, graph = torch.ones(2, device="cuda"), torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match=rf"at {HERE}:\d+ <lambda>"), torch.cuda.graph(graph):
        row.fill_(5)
        REFUSED[case](row)
    assert row.tolist() == [1, 1]
    assert not torch.cuda.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="nothing was captured"):
        graph.replay()


def test_copies_of_pinned_memory_are_part_of_a_graph() -> None:
    given, taken = torch.ones(2).pin_memory(), torch.zeros(2).pin_memory()
    row = torch.zeros(2, device="cuda")

    def step() -> torch.Tensor:
        row.copy_(given, non_blocking=True)
        taken.copy_(row * 3, non_blocking=True)
        return row

    graph, _ = captured(step)
    assert graph.num_kernels == 3  # type: ignore[attr-defined]
    assert not row.any()
    given.fill_(4)
    graph.replay()
    assert taken.tolist() == [0, 0], "it arrives with the next wait"
    torch.cuda.synchronize()
    assert taken.tolist() == [12, 12]


def test_pinned_memory_must_not_be_written_before_a_replay_has_ended() -> None:
    given, row = torch.ones(2).pin_memory(), torch.zeros(2, device="cuda")
    graph, _ = captured(lambda: row.copy_(given, non_blocking=True))
    given.fill_(2)
    graph.replay()
    torch.cuda.synchronize()
    graph.replay()
    given.fill_(3)
    with pytest.raises(HostRace):
        torch.cuda.synchronize()


def test_a_replay_spoils_the_results_of_later_graphs_of_its_pool_alone() -> None:
    row, pool = torch.ones(2, device="cuda"), torch.cuda.graph_pool_handle()
    (first, early), (second, late) = (captured(lambda: row + 1, pool) for _ in range(2))
    other, kept = captured(lambda: row + 2)
    for graph in (first, second, other):
        graph.replay()
    assert (early.tolist(), late.tolist(), kept.tolist()) == ([2, 2], [2, 2], [3, 3])
    first.replay()
    assert late.isnan().all()
    assert (early.tolist(), kept.tolist()) == ([2, 2], [3, 3])


def test_captures_do_not_nest_and_a_graph_is_captured_once() -> None:
    row = torch.ones(2, device="cuda")
    graph, _ = captured(lambda: row + 1)
    with pytest.raises(CaptureError, match="has one"), torch.cuda.graph(graph):
        pass
    with pytest.raises(CaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        graph.replay()
    graph.reset()
    with torch.cuda.graph(graph):
        result = row + 2
    graph.replay()
    assert result.tolist() == [3, 3]
