"""Calls repeated without torch's guard checks give the function's results, or go through torch.

Run: pytest tests/model/compiled/test_shape.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from model.compiled.shape import CompiledShape


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counted(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., torch.Tensor | None]
) -> tuple[CompiledShape, list[None]]:
    """Return a compiled shape, and a list that grows with every call through torch."""
    calls: list[None] = []
    shape = CompiledShape(function, "eager")
    through_torch = shape._through_torch

    def counting(*given: object) -> object:
        calls.append(None)
        return through_torch(*given)

    monkeypatch.setattr(shape, "_through_torch", counting)
    return shape, calls


@pytest.mark.parametrize(
    "function",
    [lambda a, b, c: a - b * c, lambda a, b, c: (b - a, c)[0] + c, lambda a, b, c: (a @ b + c)[1:]],
)
def test_other_arguments_take_the_place_of_the_first(
    function: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, calls = counted(monkeypatch, function)
    first, second, stays = torch.randn(2, 4, 4), torch.randn(2, 4, 4), torch.ones(4)
    result, again = shape.first(tuple(first), stays)
    torch.testing.assert_close(result, function(*first, stays))
    for _ in range(2):
        torch.testing.assert_close(again(tuple(second)), function(*second, stays))
        stays += 1  # the same tensor, whatever it holds
    assert len(calls) == 1


def test_nothing_is_returned_but_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(value: torch.Tensor, total: torch.Tensor) -> None:
        total += value

    shape, calls = counted(monkeypatch, add)
    total = torch.zeros(3)
    result, again = shape.first((torch.ones(3),), total)
    assert result is None and again((torch.full((3,), 2.0),)) is None
    assert total.tolist() == [3.0] * 3 and len(calls) == 1


@pytest.mark.parametrize("function", [lambda a, b, c: a + c, lambda a, b, c: b])
def test_what_the_code_alone_does_not_do_is_not_called_again(
    function: Callable[..., torch.Tensor],
) -> None:
    shape = CompiledShape(function, "eager")
    given = (torch.zeros(3), torch.ones(3), torch.full((3,), 2.0))
    result, again = shape.first(given[:2], given[2])
    torch.testing.assert_close(result, function(*given))
    assert again is None


def test_one_tensor_as_two_arguments_says_nothing_of_two() -> None:
    shape = CompiledShape(lambda a, b: a - 2 * b, "eager")
    given = torch.ones(3)
    result, again = shape.first((given, given))
    assert result is not None and result.tolist() == [-1.0] * 3 and again is None
