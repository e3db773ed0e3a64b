"""The inputs of replayed passes, and their KV cache in buckets of rows, at fixed addresses.

A graph holds addresses, so the inputs of a pass are one tensor, uploaded in one copy. All rows of the cache exist
from the start, passes see a bucket of them, and layers write at a position that is a tensor: shapes and addresses
stay the same as a sequence grows.

Shapes: N nodes of a draft, P nodes of its bucket, B sequences, n moved rows or rows of a pass; H key-value heads, M
rows of a view, D head dimension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import Cache

from ...engine.tree import DraftTree
from ...machine.hardware import uploaded, write
from .cache import BufferShape, LayerShape, MadeLayer, TreeCache, new_layer

# Rows of a sequence that one upload can move; longer accepted paths off the draft's first nodes are rare.
MOST_MOVED = 32


class SequenceNodes(NamedTuple):
    """The nodes of one sequence's draft."""

    start: int  # rows of the sequence in use before the pass
    tree: DraftTree


class PassNumbers(NamedTuple):
    """The whole numbers of a pass's inputs."""

    starts: torch.Tensor  # the first row that each sequence writes, [B]
    bases: torch.Tensor  # the position of each sequence's root, [B]
    sources: torch.Tensor  # rows to move before the pass, [n]; without any, row 0 to itself
    targets: torch.Tensor
    token_ids: torch.Tensor  # [B, P]
    depths: torch.Tensor  # [B, P]


class PassInputs:
    """The inputs of passes over P nodes of each of B sequences that change from step to step.

    Attributes:
        place: int32 numbers at a fixed address.
        sees: which nodes each node sees, bool [B, P, P].
    """

    def __init__(
        self,
        num_padded: int,  # P
        device: torch.device,
        num_sequences: int = 1,  # B
        most_moved: int = MOST_MOVED,  # n
    ) -> None:
        self.num_sequences, self.num_padded, self.most_moved = num_sequences, num_padded, most_moved
        num_nodes = num_sequences * num_padded
        self._counts = (num_sequences, num_sequences, most_moved, most_moved, num_nodes, num_nodes)
        num_bytes = 4 * sum(self._counts)
        with torch.inference_mode(False):
            self._bytes = torch.zeros(
                num_bytes + num_nodes * num_padded, dtype=torch.uint8, device=device
            )
        self._place = self._bytes[:num_bytes].view(torch.int32)
        self.place = self._split(self._place)
        shape = (num_sequences, num_padded, num_padded)
        self.sees = self._bytes[num_bytes:].view(torch.bool).view(shape)

    def numbers(self) -> PassNumbers:
        """Return the numbers as int64, by one kernel."""
        return self._split(self._place.long())

    def upload(
        self,
        sequences: Mapping[int, SequenceNodes],
        moves: Sequence[tuple[int, int]],
        idle_start: int = 0,
    ) -> None:
        """Write the inputs of a pass; the host does not wait.

        Args:
            sequences: by their index among the B sequences.
            moves: (source, target) of up to n rows.
            idle_start: the first row that other sequences write, whose nodes say nothing.
        """
        numbers = np.zeros(sum(self._counts), dtype=np.int32)
        starts, bases, sources, targets, *of_nodes = np.split(numbers, np.cumsum(self._counts[:-1]))
        starts[:] = idle_start
        if moves:
            sources[: len(moves)], targets[: len(moves)] = zip(*moves, strict=True)
        token_ids, depths = (each.reshape(self.num_sequences, -1) for each in of_nodes)
        # A padding node sees itself alone.
        sees = np.eye(self.num_padded, dtype=bool)[None].repeat(self.num_sequences, axis=0)
        for index, (start, tree) in sequences.items():
            num_nodes = tree.topology.num_nodes
            starts[index] = bases[index] = start
            if _is_on_host(tree):
                token_ids[index, :num_nodes] = tree.token_ids.numpy()
            depths[index, :num_nodes] = tree.topology.depths
            sees[index, :num_nodes, :num_nodes] = tree.topology.ancestor_mask.numpy()
        packed = np.concatenate((numbers.view(np.uint8), sees.view(np.uint8).ravel()))
        write(self._bytes, packed)
        for index, (_, tree) in sequences.items():
            if not _is_on_host(tree):
                self.place.token_ids[index, : tree.topology.num_nodes].copy_(tree.token_ids)

    def _split(self, numbers: torch.Tensor) -> PassNumbers:
        parts = PassNumbers(*numbers.split(self._counts))
        shape = (self.num_sequences, self.num_padded)
        return parts._replace(
            token_ids=parts.token_ids.view(shape), depths=parts.depths.view(shape)
        )


def _is_on_host(tree: DraftTree) -> bool:
    return tree.token_ids.device.type == "cpu"


# Numbers of moved rows are rounded up to this, or a higher power of two; paths are rarely deeper.
FEWEST_MOVED = 8


class PassRows:
    """The rows that a pass writes: those from `start`, the rows in use before it, a tensor [], on."""

    def __init__(self, start: torch.Tensor) -> None:
        self.start = start
        self._rows: torch.Tensor | None = None

    def begin(self, count: int) -> None:
        """Compute the indices of a pass over `count` rows once, for all layers."""
        self._rows = torch.arange(count, device=self.start.device) + self.start

    def next(self, count: int) -> torch.Tensor:
        if self._rows is not None and len(self._rows) == count:
            return self._rows
        return torch.arange(count, device=self.start.device) + self.start


class FixedLayer(MadeLayer):
    """One layer's M rows of each sequence, which are all shown."""

    def get_mask_sizes(self, query: int | torch.Tensor) -> tuple[int, int]:
        return self.keys.shape[-2], 0


class StaticLayer(FixedLayer):
    """One layer's first M rows, written where `PassRows` says."""

    is_compileable = True

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, rows: PassRows) -> None:
        super().__init__()
        self.keys = keys  # [1, H, M, D]
        self.values = values  # [1, H, M, D]
        self.rows = rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write rows [1, H, n, D] and return all M rows; the mask must block unused ones."""
        rows = self.rows.next(key_states.shape[-2])
        self.keys.index_copy_(2, rows, key_states)
        self.values.index_copy_(2, rows, value_states)
        return self.keys, self.values

    def get_seq_length(self, *args: object) -> torch.Tensor:
        """Return the rows in use before this pass, a tensor []: the same for all layers."""
        return self.rows.start


class StaticView(Cache):
    """The first `num_rows` rows of a storage, for one step; `rows` are those that a pass writes."""

    def __init__(
        self, layers: Sequence[StaticLayer], rows: PassRows, buffers: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(layers=list(layers))
        self.rows = rows
        self._buffers = buffers  # all rows of all layers, by shape, [layers, rows, H, D]

    @property
    def start(self) -> torch.Tensor:
        return self.rows.start

    @property
    def num_rows(self) -> int:
        rows: int = self.layers[0].keys.shape[2]
        return rows

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy rows `sources` [n] to `targets` [n] in every layer; all are read before any is written."""
        for buffer in self._buffers:
            buffer.index_copy_(1, targets, buffer.index_select(1, sources))


class StaticStorage:
    """Rows for every layer that writes, at fixed addresses.

    Args:
        layer_shapes: one entry a layer; None for layers that read another layer's cache.
        num_rows: rows of every layer.
        device: device of all layers.
        buffers: the rows, as the attribute; None: new ones.

    Attributes:
        buffers: keys and values of all layers of one shape, [layers, num_rows, H, D].
        layers: keys and values of each layer, [num_rows, H, D]; None for those that read another's.
    """

    def __init__(
        self,
        layer_shapes: Sequence[LayerShape | None],
        num_rows: int,
        device: torch.device,
        buffers: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.num_rows, self._shapes = num_rows, layer_shapes
        self._views: dict[int, StaticView] = {}
        parts = [part for shape in layer_shapes if shape for part in shape.buffers]
        counts = Counter(parts).items()
        free: dict[BufferShape, list[torch.Tensor]] = {part: [] for part in parts}
        # Usable in and out of inference mode.
        with torch.inference_mode(False):
            self._rows = PassRows(torch.zeros((), dtype=torch.long, device=device))
            if buffers is None:
                buffers = [_rows(part, count, num_rows) for part, count in counts]
            self.buffers = list(buffers)
            for (part, _), buffer in zip(counts, buffers, strict=True):
                free[part] += buffer.unbind()
        self.layers = [
            tuple(free[part].pop(0) for part in shape.buffers) if shape else None
            for shape in layer_shapes
        ]

    @property
    def start(self) -> torch.Tensor:
        """Rows in use before a pass, a tensor []."""
        return self._rows.start

    def clear(self) -> None:
        """Zero all rows: a mask hides an earlier sequence's numbers, but not a NaN."""
        for buffer in self.buffers:
            buffer.zero_()

    def parts(self, num_rows: int) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """Return keys and values [1, H, num_rows, D] of the first rows, one pair for each layer."""
        return [
            pair and tuple(tensor[:num_rows].transpose(0, 1)[None] for tensor in pair)  # type: ignore[misc]
            for pair in self.layers
        ]

    def part(self, begin: int, num_rows: int) -> StaticStorage:
        """Return `num_rows` of the rows as a storage of their own, over the same memory."""
        with torch.inference_mode(False):
            rows = [buffer[:, begin : begin + num_rows] for buffer in self.buffers]
        return StaticStorage(self._shapes, num_rows, self.start.device, buffers=rows)

    def view(self, num_rows: int) -> StaticView:
        """Return the view of the first `num_rows` rows; the same object on every call."""
        if num_rows not in self._views:
            with torch.inference_mode(False):
                parts = self.parts(num_rows)
                empty = torch.empty(1, 0, num_rows, 0, device=self.start.device)
            layers = [StaticLayer(*(pair or (empty, empty)), self._rows) for pair in parts]
            self._views[num_rows] = StaticView(layers, self._rows, self.buffers)
        return self._views[num_rows]


class GraphCache(TreeCache):
    """A `TreeCache` over a storage, whose moves of rows wait for the next pass, which makes them on the device.

    Args:
        storage: holds the rows; it serves one cache at a time.
        capacity: rows that a sequence and its drafts may take; padding may write beyond them.
    """

    def __init__(self, storage: StaticStorage, capacity: int) -> None:
        self._moves: list[tuple[int, int]] = []
        self.use_storage(storage, capacity)
        storage.clear()

    def use_storage(self, storage: StaticStorage, capacity: int) -> None:
        """Be a cache of no rows over this storage from now on."""
        self.storage = storage
        parts = storage.parts(storage.num_rows)
        self._use_layers([new_layer(pair or (), capacity) for pair in parts], capacity)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self.storage.buffers)

    def copy_rows(self, other: TreeCache, length: int) -> None:
        """Copy the first `length` rows of any cache of the same layers."""
        if isinstance(other, GraphCache):
            other.flush()
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.keys[:, :, :length] = theirs.keys[:, :, :length]
            mine.values[:, :, :length] = theirs.values[:, :, :length]
        self.set_length(length)

    def append(self, num_rows: int) -> None:
        """Mark rows that a step has written through a view as in use."""
        self.set_length(self.length + num_rows)

    def keep(self, base: int, rows: Sequence[int]) -> None:
        self.flush()
        super().keep(base, rows)

    def take_moves(self, most: int = MOST_MOVED) -> list[tuple[int, int]]:
        """Return the waiting moves, (source, target), which the caller makes now; none, once they are made, if
        there are more than `most`.
        """
        if len(self._moves) > most:
            self.flush()
        moves, self._moves = self._moves, []
        return moves

    def flush(self) -> None:
        """Make the waiting moves."""
        if moves := self.take_moves():
            sources, targets = zip(*moves, strict=True)
            self._move_now(sources, targets[0])

    def _move(self, rows: Sequence[int], start: int) -> None:
        if len(rows) > MOST_MOVED:
            self._move_now(rows, start)
        else:
            self._moves = [*zip(rows, range(start, start + len(rows)), strict=True)]

    def _move_now(self, rows: Sequence[int], start: int) -> None:
        """Copy rows to `start` and onward; the last copy is repeated, so that there are few shapes."""
        num_moves = max(FEWEST_MOVED, 1 << (len(rows) - 1).bit_length())
        targets = range(start, start + len(rows))
        repeats = num_moves - len(rows)
        ends = [*targets, *[targets[-1]] * repeats]
        moves = uploaded([*rows, *[rows[-1]] * repeats, *ends], self.storage.start.device)
        self.storage.view(self.storage.num_rows).move(moves[:num_moves], moves[num_moves:])


def _rows(shape: BufferShape, count: int, num_rows: int) -> torch.Tensor:
    """Return rows [count, num_rows, H, D]: a layer's strides do not depend on their number, as graphs need."""
    return torch.zeros(
        (count, num_rows, shape.num_heads, shape.head_dim), dtype=shape.dtype, device=shape.device
    )
