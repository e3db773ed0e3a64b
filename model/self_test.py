"""Self-test of a loaded model: is what it verifies what plain forward passes say?

A small tree of random tokens goes through the model as every draft will: the logits of every node,
and of a step after a branch was kept, must equal those of plain passes over prefix and path. It
needs no knowledge of the model's architecture, so that it also catches what no declaration reveals.

Shapes: N nodes, V vocabulary, L tokens of a plain pass.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from model.draft_tree import DraftTree, TreeTopology
from model.hf import TargetModel, UnsupportedModelError

logger = logging.getLogger(__name__)

# 13 nodes: branches at several depths, a deep chain, and siblings.
TREE = TreeTopology.from_parents((-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 10))
TREE_PATH = (0, 1, 4, 7, 11)  # skips rows, so that `TreeCache.keep` must move some
CHAIN = TreeTopology.chain(6)
CHAIN_PATH = (0, 1, 2, 3)
PREFIX_LENGTH = 11


@dataclass(frozen=True, slots=True)
class Probe:
    """A random prefix, a draft after it, a path to keep, and one more token after that path."""

    prefix: list[int]
    nodes: list[int]
    topology: TreeTopology
    path: Sequence[int]
    extra: int

    @classmethod
    def random(cls, vocab_size: int, chain_only: bool, prefix_length: int = PREFIX_LENGTH) -> Probe:
        """Return the same probe for the same arguments."""
        topology, path = (CHAIN, CHAIN_PATH) if chain_only else (TREE, TREE_PATH)
        num_tokens = prefix_length + topology.num_nodes + 1
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()
        return cls(ids[:prefix_length], ids[prefix_length:-1], topology, path, ids[-1])

    def sequences(self) -> list[list[int]]:
        """Return the true text of every node, then of the token after the kept path."""
        paths = [self.topology.path_to(node) for node in range(self.topology.num_nodes)]
        texts = [self.prefix + [self.nodes[node] for node in path] for path in paths]
        return [*texts, [*self.prefix, *(self.nodes[node] for node in self.path), self.extra]]


@torch.inference_mode()
def self_test(target: TargetModel, prefix_length: int = PREFIX_LENGTH) -> float:
    """Compare a verified draft with plain forward passes.

    Returns:
        The largest difference between logits.

    Raises:
        UnsupportedModelError: if it is more than rounding: 1e-3 standard deviations of the logits
            in float32, four times the error of the plain token-by-token loop in half precision.
    """
    probe = Probe.random(target.vocab_size, target.chain_only, prefix_length)
    expected = torch.stack([plain_logits(target, text)[-1] for text in probe.sequences()])
    error = float((verified_logits(target, probe) - expected).abs().max())
    if target.dtype.itemsize >= 4:
        allowed = 1e-3 * float(expected.std())
    else:
        allowed = 4 * _loop_error(target, probe.sequences()[-1])
    logger.info("self-test: largest logit error %.2e, allowed %.2e", error, allowed)
    if not error <= allowed:  # so that a NaN fails too
        kind = "chain" if target.chain_only else "tree"
        raise UnsupportedModelError(
            f"model type {target.config.model_type}: the logits of a verified {kind} differ from plain forward "
            f"passes by {error:.1e} (allowed: {allowed:.1e}); its output would not be lossless"
        )
    return error


def verified_logits(target: TargetModel, probe: Probe) -> torch.Tensor:
    """Return logits [N + 1, V] as decoding gets them: of every node, then of one token after the
    kept path.
    """
    cache = target.new_cache(len(probe.prefix) + probe.topology.num_nodes + 1)
    for _ in target.prefill([*probe.prefix, probe.nodes[0]], cache, with_logits=False):
        pass
    tree = DraftTree(torch.tensor(probe.nodes, device=target.device), probe.topology)
    logits = target.forward(tree, cache)
    cache.keep(len(probe.prefix), probe.path)
    step = target.forward(DraftTree.chain([probe.extra], target.device), cache)
    return torch.cat((logits, step)).float()


def plain_logits(target: TargetModel, token_ids: list[int]) -> torch.Tensor:
    """Return the logits [L, V] of one pass without a cache, float32."""
    ids = torch.tensor([token_ids], device=target.device)
    return target.model(input_ids=ids, use_cache=False, return_dict=True).logits[0].float()


def _loop_error(target: TargetModel, token_ids: list[int]) -> float:
    """Return the largest logit difference between a token-by-token loop and one pass: the noise of
    this dtype.
    """
    cache = DynamicCache(config=target.model.config)
    steps = [
        target.run(torch.tensor([token], device=target.device), position, cache, None)[0]
        for position, token in enumerate(token_ids)
    ]
    return float((torch.stack(steps).float() - plain_logits(target, token_ids)).abs().max())
