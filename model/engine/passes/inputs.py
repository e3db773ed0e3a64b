"""The inputs of a pass in static shapes as one tensor at a fixed address, uploaded in one copy.

Shapes: N nodes of a draft, P nodes of its bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...machine.transfer import write
from ..tree import DraftTree, TreeTopology

# Rows that one upload can move; longer accepted paths off the draft's first nodes are rare.
MOST_MOVED = 32


class PaddedTopology(NamedTuple):
    """A topology filled up to its bucket, on the host; a padding node sees itself alone.

    Attributes:
        depths: int32 [P].
        sees: which nodes each node sees, bool [P, P].
    """

    depths: np.ndarray
    sees: np.ndarray

    @classmethod
    def of(cls, topology: TreeTopology, num_padded: int) -> PaddedTopology:
        """Return a topology padded to this many nodes."""
        # numpy: a topology may be new at every step, and a few torch operations take as long as
        # a layer of a small model.
        num_nodes = topology.num_nodes
        sees = np.eye(num_padded, dtype=bool)
        sees[:num_nodes, :num_nodes] = topology.ancestor_mask.numpy()
        depths = np.zeros(num_padded, dtype=np.int32)
        depths[:num_nodes] = topology.depths
        return cls(depths, sees)


class PassInputs:
    """The inputs of passes over P nodes that change from step to step.

    Args:
        num_padded: P.
        device: of the model.

    Attributes:
        start: rows in use before the pass, int32 [].
        sources, targets: rows to move before the pass, int32 [MOST_MOVED]; without any, row 0 to itself.
        token_ids: int32 [P].
        depths: int32 [P].
        sees: which nodes each node sees, bool [P, P].
    """

    def __init__(self, num_padded: int, device: torch.device) -> None:
        counts = (1, MOST_MOVED, MOST_MOVED, num_padded, num_padded)
        self._num_padded, self._num_numbers = num_padded, sum(counts)
        num_bytes = 4 * self._num_numbers
        with torch.inference_mode(False):
            self._place = torch.zeros(num_bytes + num_padded**2, dtype=torch.uint8, device=device)
        numbers = self._place[:num_bytes].view(torch.int32)
        start, self.sources, self.targets, self.token_ids, self.depths = numbers.split(counts)
        self.start = start[0]
        self.sees = self._place[num_bytes:].view(torch.bool).view(num_padded, num_padded)

    def upload(
        self,
        start: int,
        moves: Sequence[tuple[int, int]],
        tree: DraftTree,
        padded: PaddedTopology,
    ) -> None:
        """Write the inputs of a pass over a draft; the host does not wait.

        Args:
            start: rows in use before the pass.
            moves: (source, target) of up to `MOST_MOVED` rows.
            tree: the draft.
            padded: its topology.
        """
        num_padded, num_nodes = self._num_padded, tree.topology.num_nodes
        numbers = np.zeros(self._num_numbers, dtype=np.int32)
        numbers[0] = start
        if moves:
            numbers[1 : 1 + len(moves)], ends = zip(*moves, strict=True)
            numbers[1 + MOST_MOVED : 1 + MOST_MOVED + len(moves)] = ends
        is_on_host = tree.token_ids.device.type == "cpu"
        if is_on_host:
            first = 1 + 2 * MOST_MOVED
            numbers[first : first + num_nodes] = tree.token_ids.numpy()
        numbers[-num_padded:] = padded.depths
        packed = np.concatenate((numbers.view(np.uint8), padded.sees.view(np.uint8).ravel()))
        write(self._place, packed)
        if not is_on_host:
            self.token_ids[:num_nodes].copy_(tree.token_ids)
