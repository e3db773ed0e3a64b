"""The adjacency matrix, on the host and, where whole steps run there, on the device.

Shapes: V vocabulary, k successors kept for a token, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from .tree_template import TreeTemplate


class AdjacencyMatrix:
    """int32 [V, k], kept on the side that wrote last and copied when the other side reads it.

    Rows not written yet hold token id 0, as in the published code: even such nodes give useful
    rows.

    Args:
        vocab_size: V.
        k: successors kept for a token.
        device: device of the target model; a CPU shares the host's memory.
    """

    def __init__(self, vocab_size: int, k: int, device: torch.device) -> None:
        self._host = np.zeros((vocab_size, k), dtype=np.int32)
        self._place = device
        self._is_shared = device.type == "cpu"
        self._device: torch.Tensor | None = None
        self._is_on_device = False  # whether the device's copy is the newer one

    @property
    def host(self) -> np.ndarray:
        """The matrix, to read and write on the host."""
        if self._is_on_device and self._device is not None and not self._is_shared:
            self._host[:] = self._device.cpu().numpy()
        self._is_on_device = False
        return self._host

    @property
    def device(self) -> torch.Tensor:
        """The matrix, to read and write on the device; the same tensor on every call."""
        if self._device is None:
            with torch.inference_mode(False):
                host = torch.from_numpy(self._host)
                self._device = host.to(self._place, copy=not self._is_shared)
            torch._dynamo.mark_static_address(self._device)
        elif not self._is_on_device and not self._is_shared:
            self._device.copy_(torch.from_numpy(self._host))
        self._is_on_device = True
        return self._device


class DeviceTemplate:
    """Token Recycling on the device, for `model.compiled.device_step`: fills the template and writes rows.

    Args:
        matrix: the drafter's matrix.
        template: shape of every draft.
        device: of the target model.
    """

    def __init__(
        self, matrix: AdjacencyMatrix, template: TreeTemplate, device: torch.device
    ) -> None:
        self.topology = template.topology
        self.num_candidates = matrix.host.shape[1]
        self._source = matrix
        self._matrix = matrix.device
        with torch.inference_mode(False):
            parents = [0, *template.topology.parents[1:]]
            self._parents = torch.tensor(parents, device=device)  # [N]
            self._ranks = torch.tensor(template.ranks, device=device)  # [N]
            self._order = torch.arange(len(parents), device=device)  # [N]
        for tensor in (self._parents, self._ranks, self._order):
            torch._dynamo.mark_static_address(tensor)

    def begin_step(self) -> None:
        """Copy rows that the host has written to the device."""
        self._matrix = self._source.device

    def fill(self, root: torch.Tensor) -> torch.Tensor:
        """Return the tokens [N]; each pass over all nodes completes one more level."""
        token_ids = root.expand(len(self._order))
        for _ in range(self.topology.max_depth):
            filled = self._matrix[token_ids[self._parents], self._ranks].long()
            token_ids = torch.where(self._order == 0, root, filled)
        return token_ids

    def learn(
        self, token_ids: torch.Tensor, candidates: torch.Tensor, is_accepted: torch.Tensor
    ) -> None:
        """Write the row of every node; of nodes with the same token an accepted one wins, else the last.

        Device code writes in any order, so all nodes with the same token write the winner's row.
        """
        order = self._order + is_accepted * len(self._order)  # [N]
        is_same = token_ids[:, None] == token_ids[None]  # [N, N]
        winners = (is_same * (order + 1)).argmax(dim=1)  # [N]
        self._matrix[token_ids] = candidates[winners].int()

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the matrix as it is now."""
        saved = self._source.device.clone()

        def undo() -> None:
            self._source.device.copy_(saved)

        return undo
