"""The simulated GPUs themselves: right numbers, what they refuse, and what they count."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.simulated_device.device import SimulatedCuda
from tests.simulated_device.double.accounts import Accounts
from tests.simulated_device.double.errors import DeviceMismatch, HostRace

HERE = "tests/simulated_device/test_device.py"


@pytest.fixture(autouse=True)
def accounts(gpu: SimulatedCuda) -> Iterator[Accounts]:
    """The accounts of a test that runs on simulated GPUs."""
    with gpu:
        gpu.accounts.clear()
        yield gpu.accounts


def test_numbers_are_those_of_the_cpu() -> None:
    matrix, scale = torch.randn(5, 7), torch.randn(7)
    moved, moved_scale = matrix.to("cuda"), scale.to("cuda")
    moved[1] = 3.0
    moved[2:4, 1] += moved_scale[0]
    matrix[1] = 3.0
    matrix[2:4, 1] += scale[0]
    found = (moved * moved_scale).softmax(dim=-1)
    assert found.device == torch.device("cuda:0")
    assert torch.equal(found.cpu(), (matrix * scale).softmax(dim=-1))


def test_torch_is_as_it_was_after_the_block(gpu: SimulatedCuda) -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 2
    gpu.__exit__(None, None, None)
    try:
        assert not torch.cuda.is_available()
        assert "data" not in vars(torch.Tensor)
        parameter = nn.Parameter(torch.ones(2))
        parameter.data = torch.zeros(2)
        assert parameter.tolist() == [0, 0]
        with pytest.raises(RuntimeError, match=r"CUDA|cuda"):
            torch.zeros(2, device="cuda:0")
    finally:
        gpu.__enter__()


def test_modules_move_there_and_back_with_their_tied_weights() -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    module = nn.Sequential(first, second)
    inputs = torch.randn(2, 3)
    expected = module(inputs)
    module.to("cuda")
    assert first.weight is second.weight
    assert isinstance(first.weight, nn.Parameter)
    assert first.weight.device == torch.device("cuda:0")
    assert torch.equal(module(inputs.to("cuda")).detach().cpu(), expected)
    module.to("cpu")
    assert isinstance(first.weight, nn.Parameter)
    assert torch.equal(module(inputs), expected)


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_tensors_of_two_devices_are_refused_with_the_place(other: str) -> None:
    mine, theirs = torch.ones(3, device="cuda"), torch.ones(3, device=other)
    with pytest.raises(DeviceMismatch, match=rf"add: .*{other} and|and {other}.* at {HERE}:\d+"):
        mine + theirs
    with pytest.raises(DeviceMismatch, match="cat"):
        torch.cat((mine, theirs))
    with pytest.raises(DeviceMismatch, match="attention"):
        nn.functional.scaled_dot_product_attention(
            mine.view(1, 1, 3, 1), theirs.view(1, 1, 3, 1), theirs.view(1, 1, 3, 1)
        )


def test_numbers_and_indices_of_the_host_are_taken(accounts: Accounts) -> None:
    row = torch.arange(4.0, device="cuda")
    assert (row + torch.tensor(1.0)).tolist() == [1, 2, 3, 4]
    accounts.clear()
    assert row[torch.tensor([2, 0])].device.type == "cuda"
    assert [kind for kind, _ in accounts.waits] == ["H2D copy of an index"]


@pytest.mark.parametrize("convert", [torch.Tensor.numpy, torch.Tensor.__array__])
def test_numpy_is_refused_with_the_place(convert: object) -> None:
    assert callable(convert)
    with pytest.raises(TypeError, match=rf"cuda:1 at {HERE}:\d+"):
        convert(torch.ones(2, device="cuda:1"))


def test_launches_are_counted_by_operation_and_views_are_none(accounts: Accounts) -> None:
    rows = torch.zeros(4, 6, device="cuda")
    accounts.clear()
    rows[1:, ::2].transpose(0, 1).unsqueeze(0).view(-1, 3)
    torch.empty(3, device="cuda")
    assert not accounts.launches
    rows.add_(1).mul_(2)
    rows @ rows.T
    nn.functional.scaled_dot_product_attention(rows[None], rows[None], rows[None])
    nn.functional.rms_norm(rows, (6,))
    assert accounts.launches == {"add_": 1, "mul_": 1, "mm": 1, "attention": 1, "rms_norm": 1}
    assert accounts.num_launches == 5
    assert not accounts.waits


WAITS = {
    "item": ("_local_scalar_dense", lambda row: row[0].item()),
    "int": ("_local_scalar_dense", lambda row: int(row[0])),
    "bool": ("_local_scalar_dense", lambda row: bool(row[0])),
    "tolist": ("tolist", lambda row: row.tolist()),
    "cpu": ("D2H copy", lambda row: row.cpu()),
    "nonzero": ("nonzero", lambda row: row.nonzero()),
    "mask": ("index by a mask", lambda row: row[row > 0]),
    "equal": ("equal", lambda row: torch.equal(row, row)),
    "pageable": ("H2D copy", lambda row: row.copy_(torch.ones(3), non_blocking=True)),
    "new tensor": ("H2D copy", lambda row: torch.tensor([1, 2], device="cuda")),
    "synchronize": ("synchronize", lambda row: torch.cuda.synchronize()),
    "stream": ("synchronize", lambda row: torch.cuda.current_stream().synchronize()),
    "event": ("synchronize", lambda row: torch.cuda.Event().synchronize()),
}


@pytest.mark.parametrize("case", WAITS)
def test_what_makes_the_host_wait_is_counted_by_place(case: str, accounts: Accounts) -> None:
    kind, act = WAITS[case]
    row = torch.ones(3, device="cuda")
    accounts.clear()
    act(row)
    assert accounts.waits == {(kind, f"{HERE}:<lambda>"): 1}


def test_copies_are_counted_by_direction_with_their_bytes(accounts: Accounts) -> None:
    row = torch.ones(3).to("cuda")
    row.to("cuda:1")
    row.cpu()
    assert accounts.copied_bytes == {"H2D": 12, "D2D": 12, "D2H": 12}
    assert {direction for direction, _ in accounts.copies} == {"H2D", "D2D", "D2H"}
    assert accounts.num_waits == 2, "a copy between GPUs is none of the host's"


def test_pinned_memory_is_known_by_its_address() -> None:
    buffer = torch.empty(4, pin_memory=True)
    assert buffer.is_pinned()
    assert buffer[1:].view(3, 1).is_pinned()
    assert torch.ones(2).pin_memory().is_pinned()
    assert not torch.ones(2).is_pinned()
    assert not torch.ones(2, device="cuda").is_pinned()
    del buffer
    others = [torch.empty(4) for _ in range(100)]
    assert not any(other.is_pinned() for other in others), "at the address of freed memory"


def test_a_copy_from_pinned_memory_is_no_wait(accounts: Accounts) -> None:
    buffer, row = torch.ones(3).pin_memory(), torch.zeros(3, device="cuda")
    accounts.clear()
    row.copy_(buffer, non_blocking=True)
    other = buffer.to("cuda", non_blocking=True)
    assert not accounts.waits
    row.copy_(buffer)
    assert accounts.num_waits == 1
    assert row.tolist() == other.tolist() == [1, 1, 1]


def test_pinned_memory_must_not_be_written_before_its_copy_has_ended() -> None:
    buffer, row = torch.ones(3).pin_memory(), torch.zeros(3, device="cuda")
    row.copy_(buffer, non_blocking=True)
    torch.cuda.synchronize()
    buffer.fill_(2)
    row.copy_(buffer, non_blocking=True)
    buffer.fill_(3)
    with pytest.raises(HostRace, match=rf"{HERE}:\d+"):
        torch.cuda.synchronize()


def test_a_copy_into_pinned_memory_arrives_with_the_next_wait(accounts: Accounts) -> None:
    buffer, row = torch.zeros(3).pin_memory(), torch.ones(3, device="cuda")
    accounts.clear()
    buffer.copy_(row, non_blocking=True)
    other = row.to("cpu", non_blocking=True)
    row.zero_()
    assert not accounts.waits
    assert buffer.tolist() == other.tolist() == [0, 0, 0]
    torch.cuda.current_stream().synchronize()
    assert buffer.tolist() == other.tolist() == [1, 1, 1]
    torch.zeros(3).copy_(row, non_blocking=True)
    assert accounts.num_waits == 2, "into pageable memory the host waits"


def test_streams_and_events_do_no_harm(accounts: Accounts) -> None:
    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    start.record()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        row = torch.ones(2, device="cuda")
    torch.cuda.current_stream().wait_event(stream.record_event())
    end.record(stream)
    assert start.elapsed_time(end) > 0
    assert end.query()
    assert not accounts.waits
    assert row.tolist() == [1, 1]


def test_a_seed_gives_the_numbers_of_the_cpu() -> None:
    generator = torch.Generator("cuda").manual_seed(5)
    weights = torch.ones(9, device="cuda")
    drawn = torch.multinomial(weights, 4, generator=generator)
    assert generator.device.type == "cuda"
    expected = torch.multinomial(torch.ones(9), 4, generator=torch.Generator().manual_seed(5))
    assert drawn.tolist() == expected.tolist()


def test_the_current_device_is_where_new_tensors_are() -> None:
    torch.cuda.set_device(1)
    try:
        assert torch.ones(1, device="cuda").device == torch.device("cuda:1")
        assert torch.cuda.current_device() == 1
    finally:
        torch.cuda.set_device(0)
    with torch.cuda.device(1):
        assert torch.ones(1, device="cuda").device == torch.device("cuda:1")
    assert torch.ones(1, device="cuda").device == torch.device("cuda:0")


def test_a_message_names_the_line_of_the_library_that_was_called() -> None:
    norm = LlamaRMSNorm(3).to("cuda:1")
    with pytest.raises(DeviceMismatch, match=rf"{HERE}:\d+ .* \(in transformers/.*llama.*py:\d+\)"):
        norm(torch.ones(1, 3, device="cuda:0"))
