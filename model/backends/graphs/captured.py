"""Parts of replayed passes: their shapes, their inputs and logits at fixed addresses, and their graphs.

A captured call reads and writes memory at fixed addresses, so it takes no arguments: what changes
from call to call is copied to these addresses before. A draft is padded to a bucket of nodes, and the
cache shows a bucket of rows.

Shapes: P nodes of a bucket, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ...machine.hardware import CapturedGraph, captured_graph
from ..passes.static_cache import PassInputs

# Kernels work in tiles of 8 rows, and each bucket costs a capture; 88 holds the paper's 81 nodes.
NODE_BUCKETS = (1, 4, 8, 16, 32, 48, 64, 88, 128)
NODE_STEP = 64  # between larger buckets
SHORTEST_LENGTH = 512


def node_bucket(num_nodes: int) -> int:
    """Return the number of nodes to which a draft is padded."""
    for bucket in NODE_BUCKETS:
        if num_nodes <= bucket:
            return bucket
    return -(-num_nodes // NODE_STEP) * NODE_STEP


def length_bucket(num_rows: int) -> int:
    """Return the cache rows shown to a pass that reads and writes `num_rows`: a power of two."""
    return max(SHORTEST_LENGTH, 1 << (num_rows - 1).bit_length())


class CaptureFailed(RuntimeError):
    """A call does something that a CUDA graph cannot hold, such as waiting for the device."""

    @classmethod
    def of(cls, error: Exception) -> CaptureFailed:
        """Return the failure that an error is the cause of, in one line."""
        lines = str(error).splitlines() or [""]
        return cls(f"{type(error).__name__}: {lines[0]}")


class CapturedCalls:
    """Calls by key: the first of a key runs as it is, the second is captured, and later ones are replayed.

    A capture executes nothing, so that every call is executed exactly once. The first one is there
    for libraries that prepare themselves at their first use, which cannot be captured.

    All graphs share their memory: an output must be used before the next call.

    A call that cannot be captured runs as it is every time.

    Attributes:
        failure: why the last call that could not be captured could not; empty if there was none.
        num_prepared: calls that were no replay, which take far longer.
        seconds: spent on these.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._captured: dict[Hashable, CapturedGraph | None] = {}
        self._uncapturable: set[Hashable] = set()
        self.failure = ""
        self.num_prepared = 0
        self.seconds = 0.0

    def __len__(self) -> int:
        """Return the number of graphs."""
        return sum(known is not None for known in self._captured.values())

    def run(self, key: Hashable, call: Callable[[], Any]) -> Any:
        """Return the output of a call, of which the key tells all that a replay does not read from memory."""
        known = self._captured.get(key)
        if known is None:
            begin = time.perf_counter()
            self.num_prepared += 1
            output, known = self._prepare(key, call)
            self.seconds += time.perf_counter() - begin
            if known is None:
                return output
        known.graph.replay()
        return known.output

    def _prepare(self, key: Hashable, call: Callable[[], Any]) -> tuple[Any, CapturedGraph | None]:
        """Return the output of a call that runs as it is; or None, and its graph."""
        is_first = key not in self._captured
        self._captured[key] = None
        if is_first or key in self._uncapturable:
            return call(), None
        try:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            self._captured[key] = found = captured_graph(call, self._device, self._pool)
        except RuntimeError as error:
            self.failure = str(CaptureFailed.of(error))
            self._uncapturable.add(key)
            return call(), None
        return None, found

    def forget(self, is_old: Callable[[Any], bool]) -> None:
        """Forget the calls with such keys."""
        self._captured = {key: value for key, value in self._captured.items() if not is_old(key)}


class Passes:
    """Passes over the rows of one storage: where their inputs and logits are, and their graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.calls = CapturedCalls(device)
        # Of the last pass over each bucket of nodes, [P, V].
        self.logits: dict[int, torch.Tensor] = {}
        self.last: torch.Tensor | None = None  # the logits of the last pass
        self._inputs: dict[int, PassInputs] = {}

    def inputs_of(self, num_padded: int) -> PassInputs:
        """Return the inputs of passes over P nodes; the same object on every call."""
        if num_padded not in self._inputs:
            self._inputs[num_padded] = PassInputs(num_padded, self._device)
        return self._inputs[num_padded]

    def keep_logits(self, logits: torch.Tensor) -> None:
        """Copy logits [P, V] to their place, from which read-outs read, whatever the number of cache rows."""
        num_padded = len(logits)
        if num_padded not in self.logits:
            with torch.inference_mode(False):
                self.logits[num_padded] = torch.empty(
                    logits.shape, dtype=logits.dtype, device=logits.device
                )
        self.logits[num_padded].copy_(logits)
