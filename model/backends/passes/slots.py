"""The rows of several sequences side by side in one storage, a slot each: the layout of batches on a GPU.

Each sequence has a cache over the rows of its slot, as if it were alone. A pass shows the first T rows of the first
B slots as one batch of B sequences, as stock models take it: every layer writes all new rows by one call, and
attends by one call, in which each sequence sees its own rows alone.

Shapes: B sequences of a pass, M rows of a slot, T of them shown, N nodes of each sequence, H key-value heads, D
head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import Cache

from .cache import LayerShape
from .static_cache import MOST_MOVED, FixedLayer, GraphCache, PassInputs, StaticStorage

# The last row of a slot is no sequence's: padding that goes beyond the slot is written there.
NUM_SPARE = 1
# Rows of a slot are a multiple of this, since all sequences move where a longer one comes.
SLOT_STEP = 512
# Most rows that one upload moves: those of one sequence, or a few of each.
MOST_OF_EACH = 8


class SlotCache(GraphCache):
    """The cache of the sequence in a slot, by its index."""

    is_lasting = False  # another sequence takes the slot

    def __init__(self, slots: Slots, index: int) -> None:
        storage = slots.parts[index]
        super().__init__(storage, storage.num_rows - NUM_SPARE)
        self.index = index

    def move_to(self, storage: StaticStorage) -> None:
        """Move to this storage, which has more rows."""
        self.flush()
        length, old = self.length, self.storage
        for mine, theirs in zip(storage.buffers, old.buffers, strict=True):
            mine[:, :length] = theirs[:, :length]
        self.use_storage(storage, storage.num_rows - NUM_SPARE)
        self.set_length(length)


class Slots:
    """Rows for several sequences at fixed addresses; none at first.

    Args:
        layer_shapes: one entry a layer; None for layers that read another layer's cache.
        size: slots.
        device: device of all layers.

    Attributes:
        num_rows: M.
        storage: all rows, slot after slot.
        parts: the rows of each slot.
    """

    def __init__(
        self, layer_shapes: Sequence[LayerShape | None], size: int, device: torch.device
    ) -> None:
        self.size = size
        self._layer_shapes, self._device = layer_shapes, device
        self._inputs: dict[tuple[int, int], PassInputs] = {}
        self._make(num_rows=0)

    @property
    def capacity(self) -> int:
        """The most rows of a sequence."""
        return self.num_rows - NUM_SPARE

    def lengthen(self, capacity: int, caches: Sequence[SlotCache]) -> None:
        """Make slots for sequences of up to `capacity` rows, and move those of the caches."""
        self._make(-(-(capacity + NUM_SPARE) // SLOT_STEP) * SLOT_STEP)
        for cache in caches:
            cache.move_to(self.parts[cache.index])

    def _make(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.storage = StaticStorage(self._layer_shapes, self.size * num_rows, self._device)
        self.parts = [self.storage.part(slot * num_rows, num_rows) for slot in range(self.size)]
        self._views: dict[tuple[int, int], SlotsView] = {}

    def view(self, num_sequences: int, num_rows: int) -> SlotsView:
        """Return the first T rows of the first B slots, as a pass sees them; the same object on every call."""
        shape = (num_sequences, num_rows)
        if shape not in self._views:
            with torch.inference_mode(False):
                self._views[shape] = SlotsView(self, *shape)
        return self._views[shape]

    def inputs_of(self, num_sequences: int, num_nodes: int) -> PassInputs:
        """Return the inputs of passes over N nodes of the first B slots; the same object on every call."""
        shape = (num_sequences, num_nodes)
        if shape not in self._inputs:
            most_moved = max(MOST_MOVED, MOST_OF_EACH * num_sequences)
            self._inputs[shape] = PassInputs(num_nodes, self._device, num_sequences, most_moved)
        return self._inputs[shape]

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy rows of the storage, `sources` [n] to `targets` [n], in every layer."""
        self.storage.view(self.storage.num_rows).move(sources, targets)


class SlotRows:
    """The rows that a pass writes in B slots of M rows."""

    def __init__(self, num_sequences: int, num_rows: int, device: torch.device) -> None:
        self._last = num_rows - 1
        self.slots = torch.arange(num_sequences, device=device)[:, None]  # [B, 1]
        self.rows = self.slots.new_empty(num_sequences, 0)  # within their slots, [B, N]

    def begin(self, starts: torch.Tensor, num_nodes: int) -> None:
        """Let the next pass write N rows of each slot from `starts` [B] on; those beyond it go to its last row."""
        nodes = torch.arange(num_nodes, device=starts.device)
        self.rows = (starts[:, None] + nodes).clamp(max=self._last)


class SlotsLayer(FixedLayer):
    """One layer of B slots, of which T rows are shown."""

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, rows: SlotRows, num_shown: int
    ) -> None:
        super().__init__()
        self._all = (keys, values)  # [B, M, H, D]
        self._rows = rows
        self.keys, self.values = (part[:, :num_shown].transpose(1, 2) for part in self._all)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write rows [B, H, N, D], and return the rows shown of each slot [B, H, T, D]."""
        for rows, states in zip(self._all, (key_states, value_states), strict=True):
            rows[self._rows.slots, self._rows.rows] = states.transpose(1, 2)
        return self.keys, self.values

    def get_seq_length(self, *args: object) -> int:
        """Return the rows shown before the nodes of a pass: a number, since each sequence has another one."""
        length: int = self.keys.shape[-2] - self._rows.rows.shape[1]
        return length


class SlotsView(Cache):
    """The first T rows of the first B slots, for a pass."""

    def __init__(self, slots: Slots, num_sequences: int, num_rows: int) -> None:
        device, size = slots.storage.start.device, slots.num_rows
        self.rows, self.num_rows = SlotRows(num_sequences, size, device), num_rows
        empty = torch.empty(num_sequences * size, 0, 0, device=device)
        layers = []
        for pair in slots.storage.layers:
            keys, values = (
                part[: num_sequences * size].unflatten(0, (num_sequences, size))
                for part in pair or (empty, empty)
            )
            layers.append(SlotsLayer(keys, values, self.rows, num_rows))
        super().__init__(layers=layers)
