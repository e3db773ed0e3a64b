"""Read-out: everything the host needs of a pass, copied in one transfer.

A state sketch is the logits of a few tokens spread evenly over the vocabulary. Logits are linear in
the last hidden state, so close states have close sketches, and every model gives logits.

Shapes: N nodes, V vocabulary, k candidates, S sketches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..kernels.largest_logits import top_k
from ..machine.hardware import downloaded
from .tree import DraftTree, TreeTopology

# Candidates read in measurements of a pass.
USUAL_CANDIDATES = 8
# Tokens of a sketch; a smaller vocabulary is used whole.
SKETCH_SIZE = 64


class Candidates(NamedTuple):
    """The likeliest next tokens after every node, on the host.

    Lists, not arrays: a pass evicts everything from the processor's caches, so that a call into a
    library takes longer than a loop over the numbers of a usual draft.

    Attributes:
        token_ids: k for each of N nodes, the likeliest first.
        logits: of these tokens.
    """

    token_ids: list[list[int]]
    logits: list[list[float]]


class ReadOut(NamedTuple):
    """The part of a pass that the host reads.

    Attributes:
        node_tokens: token of every node [N].
        candidates: of every node.
        sketches: of every node, float32 [N, S]; None if they are not wanted.
    """

    node_tokens: list[int]
    candidates: Candidates
    sketches: torch.Tensor | None


# A function such as `read_out`, with all its arguments.
Reader = Callable[[DraftTree, torch.Tensor, int, bool], ReadOut]


def read_out(
    tree: DraftTree, logits: torch.Tensor, num_candidates: int, with_sketches: bool = False
) -> ReadOut:
    """Copy a tree's tokens, candidates and sketches to the host in one transfer.

    Args:
        tree: N nodes.
        logits: [N, V].
        num_candidates: k; for k = 1 the first of equal logits wins, else any of them.
        with_sketches: whether sketches are wanted.
    """
    if logits.device.type != "cpu":
        tokens = None if tree.token_ids.device.type == "cpu" else tree.token_ids
        packed = packed_read_out(logits, num_candidates, with_sketches, tokens)
        count = min(num_candidates, logits.shape[-1])
        return unpacked(tree, downloaded(packed), count, tokens is not None)
    values, token_ids = _likeliest(logits, num_candidates)
    sketches = state_sketch(logits) if with_sketches else None
    found = Candidates(token_ids.tolist(), values.tolist())
    return ReadOut(tree.token_ids.tolist(), found, sketches)


def read_out_of_texts(
    trees: Sequence[DraftTree], logits: torch.Tensor, num_candidates: int, with_sketches: bool
) -> list[ReadOut]:
    """Copy what is read of a pass over several texts' trees to the host in one transfer; return each text's part.

    Args:
        trees: of the texts, S nodes in all.
        logits: after every node, text after text, [S, V].
        num_candidates: as `read_out`, for all texts.
        with_sketches: as `read_out`.
    """
    # Of its shape the number of nodes alone is read.
    whole = DraftTree(
        torch.cat([tree.token_ids for tree in trees]), TreeTopology.chain(len(logits))
    )
    tokens, candidates, sketches = read_out(whole, logits, num_candidates, with_sketches)
    found, begin = [], 0
    for tree in trees:
        rows = slice(begin, begin + tree.topology.num_nodes)
        part = Candidates(candidates.token_ids[rows], candidates.logits[rows])
        found.append(ReadOut(tokens[rows], part, None if sketches is None else sketches[rows]))
        begin = rows.stop
    return found


def packed_read_out(
    logits: torch.Tensor,
    num_candidates: int,
    with_sketches: bool = False,
    token_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the input of `unpacked`, on the device of the logits [N, V], as one int32 tensor with a row a node.

    Columns: candidates [N, k], their logits [N, k], sketches [N, S] if wanted, and the nodes' tokens [N]
    if they are given.
    """
    values, candidates = _likeliest(logits, num_candidates)
    numbers = values.float()
    if with_sketches:
        numbers = torch.cat((numbers, state_sketch(logits)), dim=1)
    parts = [candidates.int(), numbers.view(torch.int32)]
    if token_ids is not None:
        parts.append(token_ids[:, None].int())
    return torch.cat(parts, dim=1)


def unpacked(
    tree: DraftTree, packed: torch.Tensor, num_candidates: int, has_tokens: bool
) -> ReadOut:
    """Undo `packed_read_out` on the host; the rows of the tree's nodes are the first ones."""
    count, end = num_candidates, packed.shape[1] - has_tokens
    packed = packed[: tree.topology.num_nodes]
    tokens = packed[:, end] if has_tokens else tree.token_ids
    values = packed[:, count : 2 * count].view(torch.float32)
    sketches = packed[:, 2 * count : end].view(torch.float32)
    found = Candidates(packed[:, :count].tolist(), values.tolist())
    return ReadOut(tokens.tolist(), found, sketches if sketches.shape[1] else None)


def _likeliest(logits: torch.Tensor, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logits of every row and their columns, each [N, k]."""
    count = min(num_candidates, logits.shape[-1])
    if count == 1:
        values, token_ids = logits.max(dim=-1, keepdim=True)
        return values, token_ids
    return top_k(logits, count)


def sketch_ids(vocab_size: int) -> range:
    """Return the S tokens whose logits make a sketch."""
    count = min(SKETCH_SIZE, vocab_size)
    return range(0, vocab_size // count * count, vocab_size // count)


def state_sketch(logits: torch.Tensor) -> torch.Tensor:
    """Return the state sketches of logits [N, V], float32 [N, S]."""
    ids = sketch_ids(logits.shape[-1])
    return logits[:, ids.start : ids.stop : ids.step].float()
