"""Proves fused passes on the loaded model: right within rounding, and with the same bits for every row.

Logits are compared with the stock model's, bits with plain decoding by fused passes over one node. All this takes
some hundred passes, and the first time on a machine the compilation of the kernels, which Triton keeps.

Shapes: N nodes of a draft, V vocabulary.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from ...engine.tree import DraftTree, TreeTopology
from ..passes.static_cache import StaticStorage
from ..proofs.plain_decoding import PlainDecoding
from ..proofs.self_test import TREE
from .decoder import NotFusedError, decoder_of
from .fused_pass import DEEPEST, FusedPass

# A text that is longer than a tail, so that both kernels of attention take part.
NUM_TOKENS = 40
# Committed rows before the drafts: fewer than a tail, and more than a split.
BASES = (5, 150)
# Nodes of passes whose first row is compared: every kind of tile.
SIZES = (4, 24, 48, 88, 128)
# A chain that is deeper than a tree may be.
CHAIN = TreeTopology.chain(DEEPEST + 9)
NUM_ROWS = 512


@torch.inference_mode()
def fused_pass(target: Any) -> FusedPass:
    """Return the fused passes of a target, proved.

    Raises:
        NotFusedError: if they are not known to be right.
    """
    if target.dtype not in (torch.float16, torch.bfloat16):
        raise NotFusedError("not in half precision")
    decoder = decoder_of(target)
    reasons = []
    for is_interleaved in (False, True):
        fused = FusedPass(decoder, is_interleaved)
        trial = _Trial(target, fused)
        if not (reason := trial.why_wrong()):
            fused.why_not = trial.why_bits_differ()
            fused.has_same_bits = not fused.why_not
            return fused
        reasons.append(reason)
    raise NotFusedError(reasons[0])


class _Trial:
    """Fused passes over rows of their own."""

    def __init__(self, target: Any, fused: FusedPass) -> None:
        self._target, self._fused = target, fused
        self._storage = StaticStorage(target.layer_shapes, NUM_ROWS, target.device)
        self._view = self._storage.view(NUM_ROWS)
        generator = torch.Generator().manual_seed(0)
        size = (NUM_TOKENS + max(BASES, default=0) + CHAIN.num_nodes,)
        self._ids: list[int] = torch.randint(
            target.vocab_size, size, generator=generator, device="cpu"
        ).tolist()

    def why_wrong(self) -> str:
        """Return by how much the logits differ from the stock model's; empty if rounding explains it."""
        plain = PlainDecoding(self._target)
        limit = self._target.steady_limit() or NUM_TOKENS
        ids = self._ids[: min(NUM_TOKENS, limit)]
        expected = plain.path_logits([], ids)
        found = self._read(DraftTree.chain(ids), 0).float()
        rounding = torch.finfo(self._target.dtype).eps * float(expected.abs().max())
        allowed = 4 * max(plain.noise([], ids), rounding)
        error = float((found - expected).abs().max())
        return "" if error <= allowed else f"logits differ by {error:.1e} (allowed: {allowed:.1e})"

    def why_bits_differ(self) -> str:
        """Return where a row has other bits than alone; empty if nowhere."""
        limit = min(self._target.steady_limit() or NUM_ROWS, self._fused.decoder.num_positions)
        for base in BASES:
            if base + CHAIN.num_nodes > limit:
                continue
            for begin in range(0, base, 50):
                self._read(DraftTree.chain(self._ids[begin : min(base, begin + 50)]), begin)
            alone = self._read(DraftTree.chain(self._ids[base : base + 1]), base)[0].clone()
            for size in SIZES:
                beside = self._read(DraftTree.star([self._ids[base]] * size), base)[0]
                if not torch.equal(alone, beside):
                    return f"beside {size - 1} others after {base} tokens"
            for topology in (TREE, CHAIN):
                if reason := self._why_nodes_differ(topology, base):
                    return reason
        return ""

    def _why_nodes_differ(self, topology: TreeTopology, base: int) -> str:
        """Compare the nodes of a draft with plain decoding of their paths: logits, keys and values."""
        ids = self._ids[base : base + topology.num_nodes]
        logits = self._read(DraftTree(torch.tensor(ids), topology), base).clone()
        rows = [buffer[:, base : base + len(ids)].clone() for buffer in self._storage.buffers]
        for leaf in range(topology.num_nodes):
            if topology.children[leaf]:
                continue
            for depth, node in enumerate(topology.path_to(leaf)):
                alone = self._read(DraftTree.chain(ids[node : node + 1]), base + depth)[0]
                is_same = torch.equal(alone, logits[node]) and all(
                    torch.equal(buffer[:, base + depth], part[:, node])
                    for buffer, part in zip(self._storage.buffers, rows, strict=True)
                )
                if not is_same:
                    return f"a node {depth} deep after {base} tokens"
        return ""

    def _read(self, tree: DraftTree, base: int) -> torch.Tensor:
        """Return the logits [N, V] of a pass after `base` rows."""
        device = self._target.device
        start = torch.tensor([base], device=device)
        return self._fused.logits(
            tree.token_ids.to(device)[None],
            tree.topology.depth_tensor(device)[None],
            tree.topology.ancestor_mask.to(device)[None],
            start,
            start,
            self._view.layers,
            NUM_ROWS - 1,
        )


def why_unavailable(device: torch.device) -> str:
    """Return why no pass on a device can be fused; empty if one may be."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    return "" if device.type == "cuda" and torch.version.cuda else "not on a GPU of NVIDIA"
