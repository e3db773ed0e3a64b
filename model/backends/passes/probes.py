"""Probes: nodes that the model reads as an embedding of the drafter's, and not as a token.

A probe guesses nothing; the logits after it tell what the model expects one token further on. It is a node like
others: it sees its path, only its own descendants see it, and its row is dropped after the pass. The model's input
embedding gives its row, by a forward of ours within the pass.

Shapes: N nodes, S nodes of all sequences, B sequences, D size of an embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ...engine.tree import DraftTree
from ...machine.own_forwards import OwnForwards
from ..proofs.support import UnsupportedModelError


@contextmanager
def reading_probes(
    embedding: nn.Module, token_ids: torch.Tensor, probes: torch.Tensor | None
) -> Iterator[torch.Tensor]:
    """Within the block the model reads probes among these tokens as given; yield the input ids for it.

    Args:
        embedding: the model's input embedding, which it calls on the ids.
        token_ids: [.., N], `PROBE` at probes.
        probes: their embedding, [D], or one each that broadcasts to [.., N, D]; None if there are none.

    Raises:
        UnsupportedModelError: if the model does not call its input embedding on the ids.
    """
    if probes is None:
        yield token_ids
        return
    own, is_probe, input_ids = embedding.forward, token_ids < 0, token_ids.clamp(min=0)
    is_read = False

    def embed(ids: torch.Tensor) -> torch.Tensor:
        nonlocal is_read
        rows: torch.Tensor = own(ids)
        if ids.shape != is_probe.shape:
            return rows
        is_read = True
        return torch.where(is_probe[..., None], probes.to(rows), rows)

    with OwnForwards({embedding: embed}, replaces_users=True).patched():
        yield input_ids
    if not is_read:
        raise UnsupportedModelError(
            "model: does not look its tokens up in its input embedding, where this method puts its masks; use "
            "another method"
        )


def probes_of_nodes(trees: Sequence[DraftTree]) -> torch.Tensor | None:
    """Return the embedding of probes for every node, sequence after sequence, [S, D]; None if no tree has any."""
    used = _used(trees)
    if used is None:
        return None
    return torch.cat(
        [
            (used if tree.probe is None else tree.probe).expand(tree.topology.num_nodes, -1)
            for tree in trees
        ]
    )


def probes_of_sequences(trees: Mapping[int, DraftTree], num_sequences: int) -> torch.Tensor | None:
    """Return the embedding of the probes of each of B sequences, [B, 1, D], from the trees by index; None if there
    are none.
    """
    used = _used(list(trees.values()))
    if used is None:
        return None
    probes = {index: tree.probe for index, tree in trees.items() if tree.probe is not None}
    return torch.stack([probes.get(index, used) for index in range(num_sequences)])[:, None]


def _used(trees: Sequence[DraftTree]) -> torch.Tensor | None:
    """Return the probe of any tree, which stands where no node is one."""
    return next((tree.probe for tree in trees if tree.probe is not None), None)
