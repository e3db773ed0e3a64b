"""The adjacency matrix, on the host and, where whole steps run there, on the device.

A row is either overwritten by the newest successors, or averages over them: half of it is what it
was. Averaged rows have a share for each successor, its probability among the k of the row.

Shapes: V vocabulary, k successors kept for a token, N nodes, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch

from ...budget.memory import check_tensor
from ...budget.tree_template import TreeTemplate
from ...engine.read_out import LOGIT_STEPS
from ...machine.hardware import write

# Of nodes with the same token, the last ones that are averaged: each counts half of the one after it.
MOST_AVERAGED = 4
# Steps of a logit, far beyond any.
LARGEST = 2**20


class MirroredArray:
    """Zeros, kept on the side that wrote last and copied when the other one reads; a CPU shares the host's."""

    def __init__(self, shape: tuple[int, int], dtype: type, device: torch.device) -> None:
        self._host: np.ndarray = np.zeros(shape, dtype=dtype)
        self._place = device
        self._is_shared = device.type == "cpu"
        self._device: torch.Tensor | None = None
        self._is_on_device = False  # whether the device's copy is the newer one

    @property
    def host(self) -> np.ndarray:
        if self._is_on_device and self._device is not None and not self._is_shared:
            self._host[:] = self._device.cpu().numpy()
        self._is_on_device = False
        return self._host

    @property
    def device(self) -> torch.Tensor:
        """The array, to read and write on the device; the same tensor on every call."""
        if self._device is None:
            with torch.inference_mode(False):
                host = torch.from_numpy(self._host)
                self._device = host.to(self._place, copy=not self._is_shared)
        elif not self._is_on_device and not self._is_shared:
            write(self._device, self._host)
        self._is_on_device = True
        return self._device


class AdjacencyMatrix:
    """The successors of every token, and their shares if rows are averaged: a written row is half the old one.

    Rows not written yet hold token id 0, as in the published code: even such nodes give useful
    rows. Their shares are 0.
    """

    def __init__(self, vocab_size: int, k: int, device: torch.device, is_average: bool) -> None:
        self.successors = MirroredArray((vocab_size, k), np.int32, device)
        # None if rows are not averaged.
        self.shares = MirroredArray((vocab_size, k), np.float32, device) if is_average else None

    def write(
        self,
        tokens: Sequence[int],
        rows: Sequence[Sequence[int]],
        logits: Sequence[Sequence[float]],
    ) -> None:
        """Write the k likeliest tokens after each of R tokens, with their logits, in this order, on the host."""
        successors = self.successors.host
        if self.shares is None:
            for token, row in zip(tokens, rows, strict=True):
                successors[token] = row
            return
        ids, shares = (torch.from_numpy(kept) for kept in (successors, self.shares.host))
        new_ids = torch.tensor(rows, dtype=torch.int32, device=ids.device)
        new_shares = torch.tensor(logits, device=ids.device).softmax(dim=-1)
        for places in _rounds(tokens):
            index = torch.tensor([tokens[place] for place in places], device=ids.device)
            ids[index], shares[index] = averaged(
                ids[index], shares[index], new_ids[places], new_shares[places]
            )

    def memory_of_shares(self) -> dict[str, torch.Tensor]:
        """Return a copy of the shares, by name; empty if rows are not averaged."""
        return {} if self.shares is None else {"shares": torch.from_numpy(self.shares.host.copy())}

    def load_shares(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the shares of a `memory_of_shares`, if rows are averaged; raise ValueError if they do not fit."""
        if self.shares is None:
            return
        shares, host = tensors["shares"], self.shares.host
        check_tensor("matrix: got shares", shares, host.dtype, host.shape)
        if shares.numel() and not bool(((shares >= 0) & (shares <= 1)).all()):
            raise ValueError("matrix: holds shares outside 0 to 1")
        host[:] = shares.cpu().numpy()

    def clear(self) -> None:
        self.successors.host.fill(0)
        if self.shares is not None:
            self.shares.host.fill(0)


def averaged(
    ids: torch.Tensor, shares: torch.Tensor, new_ids: torch.Tensor, new_shares: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k successors with the largest sum of old and new share, and their shares, each [R, k].

    `ids` [R, k] have shares of 0 in rows that were never written; `new_ids` [R, k] are the likeliest tokens now.
    """
    is_same = new_ids[:, :, None] == ids[:, None, :]  # [R, k, k]
    again = (is_same * new_shares[:, :, None]).sum(dim=1)  # what is new of old successors, [R, k]
    old = shares + again * (shares > 0)
    is_known = (is_same & (shares > 0)[:, None, :]).any(dim=2)
    all_shares = torch.cat((old, new_shares.masked_fill(is_known, 0.0)), dim=1)  # [R, 2k]
    largest, places = all_shares.topk(ids.shape[1], dim=1)
    return torch.cat((ids, new_ids), dim=1).gather(1, places), largest / largest.sum(1, True)


def _rounds(tokens: Sequence[int]) -> list[list[int]]:
    """Return the places of tokens such that no token is twice in a round; the last of each are in the last."""
    rounds: list[list[int]] = []
    counts: dict[int, int] = {}
    for place in range(len(tokens) - 1, -1, -1):
        count = counts.get(tokens[place], 0)
        counts[tokens[place]] = count + 1
        if count == len(rounds) < MOST_AVERAGED:
            rounds.append([])
        if count < MOST_AVERAGED:
            rounds[count].append(place)
    return rounds[::-1]


class DeviceTemplate:
    """Token Recycling on the device (`model.backends.graphs.device_step`): fills the template and writes rows."""

    def __init__(
        self, matrix: AdjacencyMatrix, template: TreeTemplate, device: torch.device
    ) -> None:
        self.topology = template.topology
        self._source = matrix
        self.begin_step()
        self.num_candidates = self._successors.shape[1]
        topology = template.topology
        by_level = [node for level in topology.levels for node in level]
        with torch.inference_mode(False):
            # Of each node below the root, level by level: its parent's place in the level before, and its rank.
            self._levels = [
                torch.tensor(
                    [
                        [above.index(topology.parents[node]) for node in level],
                        [template.ranks[node] for node in level],
                    ],
                    device=device,
                )
                for above, level in pairwise(topology.levels)
            ]
            # Where each node is, level by level; and the nodes' numbers.  [N]
            self._places = torch.tensor(by_level, device=device).argsort()
            self._order = torch.arange(len(by_level), device=device)

    def begin_step(self) -> None:
        """Copy rows that the host has written to the device."""
        self._successors = self._source.successors.device
        self._shares = None if self._source.shares is None else self._source.shares.device

    def fill(self, root: torch.Tensor) -> torch.Tensor:
        """Return the tokens [N], filled level by level."""
        level, found = root[None], [root[None]]
        for parents, ranks in self._levels:
            level = self._successors[level[parents], ranks].long()
            found.append(level)
        return torch.cat(found)[self._places]

    def learn(
        self,
        token_ids: torch.Tensor,
        candidates: torch.Tensor,
        logits: torch.Tensor,
        is_accepted: torch.Tensor,
    ) -> None:
        """Write rows as the host does; in any order, so that all nodes with the same token write the same row."""
        order = self._order + is_accepted * len(self._order)  # [N]
        is_same = token_ids[:, None] == token_ids[None]  # [N, N]
        if self._shares is None:
            winners = (is_same * (order + 1)).argmax(dim=1)  # [N]
            self._successors[token_ids] = candidates[winners].int()
            return
        # How many nodes with the same token come after each.  [N]
        num_after = (is_same & (order[None] > order[:, None])).sum(dim=1)
        # Rounded as on the host (`read_out.rounded`), by one kernel.
        shares = torch.fake_quantize_per_tensor_affine(
            logits, 1 / LOGIT_STEPS, 0, -LARGEST, LARGEST
        ).softmax(dim=-1)
        for count in range(MOST_AVERAGED - 1, -1, -1):
            is_written = is_same & (num_after == count)  # [N, N], at most one a row
            winners, has_one = is_written.int().argmax(dim=1), is_written.any(dim=1, keepdim=True)
            old = self._successors[token_ids], self._shares[token_ids]
            new = averaged(*old, candidates[winners].int(), shares[winners])
            self._successors[token_ids] = torch.where(has_one, new[0], old[0])
            self._shares[token_ids] = torch.where(has_one, new[1], old[1])

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the matrix as it is now."""
        arrays = [array for array in (self._source.successors, self._source.shares) if array]
        saved = [array.device.clone() for array in arrays]

        def undo() -> None:
            for array, tensor in zip(arrays, saved, strict=True):
                array.device.copy_(tensor)

        return undo
