"""A whole step as one function of tensors: draft, forward pass, verification, keep and learn.

A GPU idles whenever the host decides something. Here the host decides nothing: it gives the root
token, and reads in one transfer the drafted, chosen and accepted tokens. The function has the
static shapes of a pass of `model.backends.graphs.graphed_target` and is replayed as one graph in the
same way.

It accepts exactly what `model.engine.verification.verify` accepts in greedy decoding, with the same
near-ties, ends of text and limits. Drafters that support it implement `Drafter.on_device`.

Shapes: N nodes, P nodes of their bucket, D the deepest node's depth, V vocabulary, k candidates.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch

from ...engine.budget import DraftBudget
from ...engine.drafter import DeviceDrafting
from ...engine.read_out import Candidates, tie_gaps
from ...engine.tree import DraftTree, TreeTopology
from ...engine.verification import Acceptance, accepted_walk, check_finite
from ...kernels.operations import top_k
from ...machine.hardware import downloaded, uploaded, write
from ..fused.fused_pass import FusedPass
from ..passes.slot_passes import masks_of_slots, run_batch
from ..passes.static_cache import GraphCache, StaticView
from ..target import TargetModel
from .captured import length_bucket

NO_LAST_ROW = 2**31 - 1  # a storage has room for a padded tree


class StepNumbers(NamedTuple):
    """The columns that the host reads of every node, each [N]: tensors on the device, lists on the host."""

    tokens: Any  # of the nodes
    chosen: Any  # the token after each node
    is_open: Any  # whether rounding could exchange it for another
    last: Any  # the last accepted node, the same in every row
    largest: Any  # the largest logit after each node, float32

    def joined(self) -> torch.Tensor:
        """Return the fields as columns, int32 [N, 5]; the last holds the bits of the floats."""
        *numbers, largest = self
        columns = [column.int().expand(len(largest)) for column in numbers]
        return torch.stack([*columns, largest.view(torch.int32)], dim=1)

    @classmethod
    def split(cls, joined: torch.Tensor) -> StepNumbers:
        """Undo `joined` on the host."""
        *numbers, largest = joined.unbind(dim=1)
        return cls(*(column.tolist() for column in (*numbers, largest.view(torch.float32))))


class StaticDeviceStep:
    """Steps of one drafter on one target model in static shapes."""

    def __init__(
        self,
        target: TargetModel,
        drafting: DeviceDrafting,
        tie_margin: float,
        eos_ids: Collection[int],
    ) -> None:
        topology, device = drafting.topology, target.device
        self.topology = topology
        self._target, self._drafting = target, drafting
        self._tie_margin, self._eos_ids = tie_margin, frozenset(eos_ids)
        self.shapes: set[tuple[int, int]] = set()  # seen so far: (bucket of nodes, bucket of rows)
        paths = [topology.path_to(node) for node in range(topology.num_nodes)]
        length = topology.max_depth + 1
        # The deepest accepted node wins; of several, the one that branches off first.
        preferred = sorted(range(len(paths)), key=lambda node: (-len(paths[node]), paths[node]))
        orders = [len(paths) - preferred.index(node) for node in range(len(paths))]
        # Usable in and out of inference mode, at fixed addresses for graphs.
        with torch.inference_mode(False):
            # Rows before the step, the root's token, and how many tokens are still allowed.
            self._numbers = torch.zeros(3, dtype=torch.long, device=device)
            self._start, self._root, self._max_tokens = self._numbers
            self._ends = torch.tensor(sorted(self._eos_ids), dtype=torch.long, device=device)
            self._parents = torch.tensor([0, *topology.parents[1:]], device=device)  # [N]
            self._depths = torch.tensor(topology.depths, device=device)  # [N]
            self._is_root = self._depths == 0  # [N]
            self._sees = topology.ancestor_mask.to(device)  # [N, N]
            self._orders = torch.tensor(orders, device=device)  # [N]
            # The path to each node, filled up with places that stay as they are.  [N, D + 1]
            self._paths = torch.tensor(
                [[*path, *range(len(path), length)] for path in paths], device=device
            )
        with torch.inference_mode():  # as those of other passes
            num_nodes, num_padded = topology.num_nodes, target.padded_size(topology.num_nodes)
            sees = np.eye(num_padded, dtype=bool)  # padding is seen only by itself
            sees[:num_nodes, :num_nodes] = topology.ancestor_mask.numpy()
            self._padded_sees = uploaded(torch.from_numpy(sees)[None], device)  # [1, P, P]
            depths = [*topology.depths, *[0] * (num_padded - num_nodes)]
            self._padded_depths = uploaded(depths, device)  # [P]

    def is_for(self, drafting: DeviceDrafting, tie_margin: float, eos_ids: Collection[int]) -> bool:
        """Whether these steps belong to this drafter, tie margin and set of end tokens."""
        is_same = self._drafting is drafting and self._tie_margin == tie_margin
        return is_same and self._eos_ids == frozenset(eos_ids)

    def fits(self, budget: DraftBudget, root: int = 0) -> bool:
        """Whether the budget allows the draft, and the root has a logit (some prompt tokens have none)."""
        is_shallow = self.topology.max_depth <= budget.max_depth
        has_logit = root < self._target.vocab_size
        return is_shallow and has_logit and (self.topology.is_chain or not budget.chain_only)

    def run(self, root: int, cache: GraphCache, max_tokens: int) -> tuple[DraftTree, Acceptance]:
        """Run a step: append the accepted rows to the cache and let the drafter learn.

        Args:
            root: the last committed token.
            cache: the rows before it.
            max_tokens: most tokens to emit.

        Returns:
            The draft and the acceptance, as from `verify`; errors are as there.
        """
        num_padded = len(self._padded_depths)
        self._drafting.begin_step()
        write(self._numbers, np.array([cache.length, root, max_tokens]))
        cache.flush()
        view = cache.storage.view(length_bucket(cache.length + num_padded))
        self.shapes.add((num_padded, view.num_rows))
        fused = self._target.fused_for(self.topology, cache.length)

        def step() -> torch.Tensor:
            view.start.copy_(self._start)
            with self._target.kernels(num_padded):
                return self._step(view, fused)

        key = (self, num_padded, view.num_rows, fused)
        joined: torch.Tensor = self._target.replayed(cache.storage, key, step)
        acceptance = self._acceptance(StepNumbers.split(downloaded(joined)), max_tokens)
        cache.append(len(acceptance.path))
        token_ids = torch.tensor(acceptance.node_tokens, device="cpu")
        return DraftTree(token_ids, self.topology), acceptance

    def warm_up(self, cache: GraphCache) -> None:
        """Run a step after the cache's rows and undo it."""
        length, undo = cache.length, self._drafting.snapshot()
        self.run(0, cache, max_tokens=1)
        cache.keep(length, ())
        undo()

    def _step(self, view: StaticView, fused: FusedPass | None) -> torch.Tensor:
        """Return a `StepNumbers` as one tensor, int32 [N, 5]."""
        target, drafting = self._target, self._drafting
        num_nodes, num_padded = self.topology.num_nodes, len(self._padded_depths)
        token_ids = drafting.fill(self._root)  # [N]
        padded = torch.nn.functional.pad(token_ids, (0, num_padded - num_nodes))
        nodes = (padded, self._padded_depths, self._padded_sees)
        logits = logits_of(target, *nodes, view, fused)
        logits = logits[:num_nodes]
        count = min(max(drafting.num_candidates, 2), logits.shape[1])
        values, candidates = top_k(logits, count)  # [N, k], [N, k]
        values = values.float()
        chosen = logits.argmax(dim=-1)  # [N]: the first of equal logits, as in plain decoding
        is_open = torch.zeros_like(chosen, dtype=torch.bool)
        if self._tie_margin and count > 1:
            is_open = values[:, 0] - values[:, 1] < tie_gaps(values[:, 0], self._tie_margin)
        ends_sequence = torch.isin(token_ids, self._ends) & ~self._is_root
        goes_on = ~is_open & ~ends_sequence & (self._depths < self._max_tokens)
        matches = (token_ids == chosen[self._parents]) & goes_on[self._parents]
        is_accepted = ((matches | self._is_root) | ~self._sees).all(dim=1)  # the whole path matches
        last = (is_accepted * self._orders).argmax(dim=0, keepdim=True)  # [1]
        sources = self._paths[last][0] + view.start  # [D + 1]
        view.move(sources, view.rows.next(len(sources)))
        k = drafting.num_candidates
        drafting.learn(token_ids, candidates[:, :k], values[:, :k], self._sees[last][0])
        return StepNumbers(token_ids, chosen, is_open, last, values[:, 0]).joined()

    def _acceptance(self, step: StepNumbers, max_tokens: int) -> Acceptance:
        """Return the acceptance, without candidates, from which the drafter has learned already."""
        path = self.topology.path_to(step.last[0])

        def choose(place: int, emitted: list[int]) -> int | None:
            node = path[place]
            check_finite(step.largest[node])
            return None if step.is_open[node] else step.chosen[node]

        # Along the path whose rows the device has kept: `verify` has one rule for where a sequence ends.
        tokens = [step.tokens[node] for node in path]
        walk = accepted_walk(
            TreeTopology.chain(len(path)), tokens, choose, self._eos_ids, max_tokens=max_tokens
        )
        nothing = Candidates([], [])
        return Acceptance(
            path, walk.tokens, step.tokens, step.chosen, nothing, is_decided=walk.is_decided
        )


def logits_of(
    target: TargetModel,
    token_ids: torch.Tensor,
    depths: torch.Tensor,
    sees: torch.Tensor,
    view: StaticView,
    fused: FusedPass | None,
) -> torch.Tensor:
    """Return the logits [P, V] of a padded tree: token ids and depths [P], which nodes each sees [1, P, P].

    Without a fused pass the stock model reads it.
    """
    starts = view.start[None]
    if fused:
        nodes = (token_ids[None], depths[None], sees)
        return fused.logits(*nodes, starts, starts, view.layers, NO_LAST_ROW, target.capturing)
    view.rows.begin(len(token_ids))
    positions = (depths + starts)[None]
    masks = masks_of_slots(target.masks, sees, starts, positions, view.num_rows, target.dtype)
    rows = view.rows.next(len(token_ids))
    return run_batch(target, token_ids[None], positions, masks, view, rows)[0]
