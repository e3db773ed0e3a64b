"""The inputs of a pass in static shapes as one tensor at a fixed address, uploaded in one copy.

Shapes: N nodes of a draft, P nodes of its bucket, B texts, n moved rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...machine.hardware import write
from ..tree import DraftTree

# Rows of a text that one upload can move; longer accepted paths off the draft's first nodes are rare.
MOST_MOVED = 32


class TextNodes(NamedTuple):
    """The nodes of one text's draft.

    Attributes:
        start: rows of the text in use before the pass.
        tree: the draft.
    """

    start: int
    tree: DraftTree


class PassNumbers(NamedTuple):
    """The whole numbers of a pass's inputs.

    Attributes:
        starts: the first row that each text writes, [B].
        bases: the position of each text's root, [B].
        sources, targets: rows to move before the pass, [n]; without any, row 0 to itself.
        token_ids: [B, P].
        depths: [B, P].
    """

    starts: torch.Tensor
    bases: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor
    token_ids: torch.Tensor
    depths: torch.Tensor


class PassInputs:
    """The inputs of passes over P nodes of each of B texts that change from step to step.

    Args:
        num_padded: P.
        device: of the model.
        num_texts: B.
        most_moved: n, rows that one upload can move.

    Attributes:
        place: int32 numbers at a fixed address.
        sees: which nodes each node sees, bool [B, P, P].
    """

    def __init__(
        self,
        num_padded: int,
        device: torch.device,
        num_texts: int = 1,
        most_moved: int = MOST_MOVED,
    ) -> None:
        self.num_texts, self.num_padded, self.most_moved = num_texts, num_padded, most_moved
        num_nodes = num_texts * num_padded
        self._counts = (num_texts, num_texts, most_moved, most_moved, num_nodes, num_nodes)
        num_bytes = 4 * sum(self._counts)
        with torch.inference_mode(False):
            self._bytes = torch.zeros(
                num_bytes + num_nodes * num_padded, dtype=torch.uint8, device=device
            )
        self._place = self._bytes[:num_bytes].view(torch.int32)
        self.place = self._split(self._place)
        shape = (num_texts, num_padded, num_padded)
        self.sees = self._bytes[num_bytes:].view(torch.bool).view(shape)

    def numbers(self) -> PassNumbers:
        """Return the numbers as int64, by one kernel."""
        return self._split(self._place.long())

    def upload(
        self,
        texts: Mapping[int, TextNodes],
        moves: Sequence[tuple[int, int]],
        idle_start: int = 0,
    ) -> None:
        """Write the inputs of a pass; the host does not wait.

        Args:
            texts: by their index among the B texts.
            moves: (source, target) of up to n rows.
            idle_start: the first row that other texts write, whose nodes say nothing.
        """
        numbers = np.zeros(sum(self._counts), dtype=np.int32)
        starts, bases, sources, targets, token_ids, depths = np.split(
            numbers, np.cumsum(self._counts[:-1])
        )
        starts[:] = idle_start
        if moves:
            sources[: len(moves)], targets[: len(moves)] = zip(*moves, strict=True)
        token_ids = token_ids.reshape(self.num_texts, self.num_padded)
        depths = depths.reshape(self.num_texts, self.num_padded)
        # A padding node sees itself alone.
        sees = np.eye(self.num_padded, dtype=bool)[None].repeat(self.num_texts, axis=0)
        for index, (start, tree) in texts.items():
            num_nodes = tree.topology.num_nodes
            starts[index] = bases[index] = start
            if _is_on_host(tree):
                token_ids[index, :num_nodes] = tree.token_ids.numpy()
            depths[index, :num_nodes] = tree.topology.depths
            sees[index, :num_nodes, :num_nodes] = tree.topology.ancestor_mask.numpy()
        packed = np.concatenate((numbers.view(np.uint8), sees.view(np.uint8).ravel()))
        write(self._bytes, packed)
        for index, (_, tree) in texts.items():
            if not _is_on_host(tree):
                self.place.token_ids[index, : tree.topology.num_nodes].copy_(tree.token_ids)

    def _split(self, numbers: torch.Tensor) -> PassNumbers:
        parts = PassNumbers(*numbers.split(self._counts))
        shape = (self.num_texts, self.num_padded)
        return parts._replace(
            token_ids=parts.token_ids.view(shape), depths=parts.depths.view(shape)
        )


def _is_on_host(tree: DraftTree) -> bool:
    return tree.token_ids.device.type == "cpu"
