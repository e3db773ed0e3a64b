"""Passes of heads on a GPU in static shapes, replayed as CUDA graphs where the target model's passes are.

A head is a few small products, which take longer to launch than to compute. So what a text's heads read of a step
is one call, and what they draft after it another; each is captured at its second run (`GraphedTarget.replayed`). A
replay reads and writes fixed addresses: what the host knows is copied there before, and all else is a tensor.

Shapes: n rows, padded to few numbers; M rows of a text that are shown; D hidden size, d head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...backends.target import TargetModel
from ...machine.hardware import write
from .layers import HeadShape, Projected, attend_rows

# More rows than this, such as a prompt's, are no replay: they come once in a text.
MOST_REPLAYED = 16
FEWEST_SHOWN = 512
SIZES = (1, 2, 4, 8, MOST_REPLAYED)  # to which rows are padded
TIMES = 2  # the first run prepares libraries, the second is captured


def lengths_to(num_tokens: int) -> list[int]:
    """Return the rows that calls show of texts of up to so many tokens."""
    lengths = [FEWEST_SHOWN]
    while lengths[-1] < num_tokens + MOST_REPLAYED:
        lengths.append(2 * lengths[-1])
    return lengths


class ReplayedRows:
    """Keys and values of a text for the layers of heads, read by replayed calls.

    Attributes:
        start: rows of the text, a tensor [].
        num_read: the same, as the host knows it.
    """

    def __init__(
        self, target: TargetModel, shape: HeadShape, dtype: torch.dtype, num_layers: int = 1
    ) -> None:
        self._target = target
        self._size = (num_layers, 2, shape.num_key_value_heads, 0, shape.head_dim)
        self.num_read = self._shown = 0
        with torch.inference_mode(False):
            self.start = torch.zeros((), dtype=torch.long, device=target.device)
            self._buffer = torch.zeros(self._size, dtype=dtype, device=target.device)
        self._inputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def read(
        self,
        token_ids: Sequence[int],
        hidden: torch.Tensor,  # [n, width]
        run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None],
        last: torch.Tensor | None = None,
    ) -> None:
        """Read rows, and leave the last one's state in `last` [1, D].

        `run` returns the states [n, D] of tokens [n], hidden states and positions [n]; None without `last`.
        """
        count = len(token_ids)
        size = next((size for size in SIZES if size >= count), count)
        self._show(self.num_read + size)
        numbers, place = self._inputs_of(size, hidden)
        write(numbers, np.array([self.num_read, count, *token_ids, *[0] * (size - count)]))
        place[:count].copy_(hidden)

        def call() -> None:
            rows = numbers[0] + torch.arange(size, device=numbers.device)
            self._rows = rows
            states = run(numbers[2:], place, rows)
            if last is not None and states is not None:
                last.copy_(states.index_select(0, numbers[1:2] - 1))
            self.start.copy_(numbers[0] + numbers[1])

        if count <= MOST_REPLAYED:
            self.replayed(("read", size), call)
        else:
            call()
        self.num_read += count

    def prepare(
        self, num_tokens: int, read: Callable[[int], object], draft: Callable[[], object]
    ) -> None:
        """Capture what is read and drafted after texts of up to `num_tokens` tokens; `read` reads so many rows."""
        # The longest first, so that rows are not moved later.
        for length in reversed(lengths_to(num_tokens)):
            for size in SIZES:
                for _ in range(TIMES):
                    self.num_read = length - MOST_REPLAYED
                    read(size)
            for _ in range(TIMES):
                draft()
        self.num_read = 0

    def replayed(self, key: tuple[object, ...], call: Callable[[], Any]) -> Any:
        """Return the output of a call over these rows, of which the key tells all that is no tensor."""
        place = (self._shown, self._buffer.data_ptr(), self._buffer.shape[3])
        return self._target.replayed(self, (*key, *place), call)

    def keep(self, projected: Projected, layer: int = 0) -> None:
        """Write the rows that are read."""
        for buffer, part in zip(self._buffer[layer], projected[1:], strict=True):
            buffer.index_copy_(1, self._rows, part)

    def attend(self, projected: Projected, layer: int = 0) -> torch.Tensor:
        """Write the rows that are read, and return their attention to the text up to each, [heads, n, d]."""
        self.keep(projected, layer)
        shown = torch.arange(self._shown, device=self._rows.device)
        return self._attended(projected.queries, [], shown <= self._rows[:, None], layer)

    def attend_drafted(
        self, projected: Projected, drafted: list[Projected], sees: torch.Tensor, layer: int = 0
    ) -> torch.Tensor:
        """Return the attention of drafted rows to the text and to drafted rows, these included.

        `sees` [n, drafted rows]: which of them each sees; they are added to `drafted`.
        """
        drafted.append(projected)
        of_text = torch.arange(self._shown, device=sees.device) < self.start
        mask = torch.cat((of_text.expand(len(sees), -1), sees), dim=1)
        return self._attended(projected.queries, drafted, mask, layer)

    def _attended(
        self, queries: torch.Tensor, drafted: Sequence[Projected], mask: torch.Tensor, layer: int
    ) -> torch.Tensor:
        keys, values = (
            torch.cat([part[:, : self._shown], *(one[place] for one in drafted)], dim=1)[None]
            for place, part in enumerate(self._buffer[layer], start=1)
        )
        return attend_rows(Projected(queries[None], keys, values), mask)[0]

    def _show(self, num_rows: int) -> None:
        """Show at least so many rows, which there is room for: a power of two."""
        self._shown = max(FEWEST_SHOWN, 1 << (num_rows - 1).bit_length())
        capacity = self._buffer.shape[3]
        if self._shown > capacity:
            shape = (*self._size[:3], self._shown, self._size[4])
            with torch.inference_mode(False):
                buffer = self._buffer.new_zeros(shape)
            buffer[:, :, :, :capacity] = self._buffer
            self._buffer = buffer

    def _inputs_of(self, size: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of numbers [2 + n] and of hidden states [n, width]."""
        if size in self._inputs:
            return self._inputs[size]
        with torch.inference_mode(False):
            numbers = self.start.new_zeros(2 + size)
            found = numbers, self._buffer.new_zeros(size, hidden.shape[1])
        if size <= MOST_REPLAYED:
            self._inputs[size] = found
        return found


class ReplayedCalls:
    """Calls of functions of tensors, whose shapes are always the same."""

    def __init__(self, target: TargetModel) -> None:
        self._target = target
        self._places: dict[object, list[torch.Tensor]] = {}

    def run(
        self, key: object, call: Callable[..., torch.Tensor], *given: torch.Tensor
    ) -> torch.Tensor:
        """Return the output of a call, of which the key tells all but these tensors."""
        if not self._target.is_replayed:
            return call(*given)
        if key not in self._places:
            with torch.inference_mode(False):
                self._places[key] = [torch.zeros_like(one) for one in given]
        places = self._places[key]
        for place, one in zip(places, given, strict=True):
            place.copy_(one)
        found: torch.Tensor = self._target.replayed(self, (key,), lambda: call(*places))
        return found.clone()  # the next call, such as of another text, overwrites it
