"""The numbers that a model computes with, compared whole: rows of a cache are right only for those they came from.

PyTorch counts writes, but not those through `.data`, nor those to tensors made in inference mode. So the bytes
themselves are summed up, at the speed of memory: about the time of a pass, which reads them too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels.short_pass import short_pass_kernel

# Words of four bytes in a row of the sums on other devices.
WIDTH = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """What rows were computed with; equal if new ones would be the same."""

    code: dict[Hashable, Any]  # of its snapshot
    sums: list[int]

    @classmethod
    def of(cls, target: Any) -> Weights | None:
        """Return those of a target's model; None if it has tensors that keep no numbers in memory of their own."""
        with target.lock:
            try:
                storages = {one.data_ptr(): one for one in _storages(target.model)}
                return cls(target.snapshot.code, [_sum(one) for one in storages.values()])
            except (NotImplementedError, RuntimeError):  # of a kind that cannot be read
                return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Weights) and self.code is other.code and self.sums == other.sums


def _storages(model: Any) -> Iterator[torch.UntypedStorage]:
    rest = [*model.parameters(), *model.buffers()]
    while rest:
        tensor = rest.pop()
        if hasattr(tensor, "__tensor_flatten__"):  # such as quantised ones
            names, _ = tensor.__tensor_flatten__()
            rest.extend(getattr(tensor, name) for name in names)
        else:
            yield tensor.untyped_storage()


def _sum(storage: torch.UntypedStorage) -> int:
    size = storage.nbytes()
    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    if data.device.type == "cpu" and short_pass_kernel():
        found: int = torch.ops.token_recycling.checksum(data)
        return found
    # By rows and by columns: numbers that changed places are seen, too.
    num_whole = size - size % (4 * WIDTH)
    rows = data[:num_whole].view(torch.int32).view(-1, WIDTH)
    rest, found = data[num_whole:].long(), size
    sums = [rows.sum(dim, dtype=torch.int64) for dim in (1, 0)]
    for part in (*sums, rest):
        places = torch.arange(1, len(part) + 1, device=data.device)
        found = found * 31 + int((part * places).sum())
    return found
