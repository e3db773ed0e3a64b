"""Passes that are compiled, and then replayed as CUDA graphs: `--compile` on a GPU.

Code compiled for one number of nodes serves all lengths of a text, so that a method needs a few
functions; each length has a graph of its own.

Shapes: P nodes of a bucket, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ..engine.passes.hidden import HiddenStates
from ..engine.passes.shapes import Preparation
from ..engine.passes.static_cache import StaticView
from .graphs import GraphedTarget
from .shape import copied
from .target import StaticTarget

logger = logging.getLogger(__name__)

# Fewer than without a compiler, since each takes a minute; 88 holds the paper's 81 nodes.
BUCKETS = (1, 8, 16, 32, 64, 88, 128)


class CompiledGraphedTarget(GraphedTarget):
    """A target model on a GPU whose passes are compiled, and replayed as CUDA graphs.

    Args:
        model: as for `TargetModel`.
        use_kernels: as for `TargetModel`.
        backend: backend of torch.compile.
        say: gets a line before each compilation.

    Raises:
        UnsupportedModelError: as `GraphedTarget`.
    """

    is_compiled = True

    def __init__(
        self,
        model: Any,
        use_kernels: bool = True,
        backend: str = "inductor",
        say: Callable[[str], object] = logger.info,
    ) -> None:
        super().__init__(model, use_kernels)
        self._backend, self._say = backend, say
        self._compiled: dict[int, Callable[..., torch.Tensor]] = {}  # by the bucket of nodes

    def hidden_states(self, layers: tuple[int, ...]) -> HiddenStates:
        """Refuse as `StaticTarget`: compiled code does not notice hooks."""
        return StaticTarget.hidden_states(self, layers)

    def padded_size(self, num_nodes: int) -> int:
        return next((size for size in BUCKETS if size >= num_nodes), super().padded_size(num_nodes))

    def logits_of(
        self, token_ids: torch.Tensor, depths: torch.Tensor, mask: torch.Tensor, view: StaticView
    ) -> torch.Tensor:
        """Return the logits [P, V] of a padded tree as `StaticTarget.logits_of`."""
        num_padded = len(token_ids)
        if num_padded not in self._compiled:
            self._say(f"compiling the pass over {num_padded} nodes, which takes a minute or so")
            self._compiled[num_padded] = torch.compile(
                copied(StaticTarget.logits_of), backend=self._backend, fullgraph=True
            )
        return self._compiled[num_padded](self, token_ids, depths, mask, view)

    @property
    def preparation(self) -> Preparation:
        return super().preparation._replace(num_functions=len(self._compiled))
