"""Bases of drafters with trained heads, which are read at once, and loaded when the target model is known."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from ...engine.drafter import Drafter, Needs
from ...engine.passes.hidden import FINAL
from ...engine.target import TargetModel
from ...machine.kept import Kept
from ..growth.tree_template import TreeTemplate, read_rank_paths
from .head_files import HeadFiles

# The static tree of Medusa and Hydra: the most useful nodes come first.
TREE = "mc_sim_7b_63"
TREE_FILE = Path(__file__).parent / "templates" / f"{TREE}.json"
NUM_NODES, NUM_RANKS = 63, 10


@lru_cache(maxsize=16)
def tree_of(num_nodes: int, num_heads: int, num_ranks: int) -> TreeTemplate:
    """Return the first nodes of the tree, as far as heads and ranks reach; the same object on every call.

    A tiny vocabulary has fewer guesses after a node than the tree's 10 ranks.
    """
    first = read_rank_paths(TREE_FILE, TREE)[:num_nodes]
    kept = [path for path in first if len(path) <= num_heads and max(path) < num_ranks]
    return TreeTemplate(kept, TREE)


class HeadDrafter(Drafter):
    """Base of all drafters with trained heads.

    Raises:
        ValueError: if the heads are missing, damaged, or have another vocabulary.
    """

    # The method whose heads it drafts with; empty: heads of its own.
    heads_of: ClassVar[str] = ""

    @classmethod
    def write_untrained_heads(cls, folder: Path, config: Any) -> None:
        """Write random heads for a model with this text config: what checks of the method draft with."""
        raise NotImplementedError


class StaticHeadDrafter(HeadDrafter):
    """Base of drafters whose heads read the final hidden states, and fill a static tree.

    Siblings share the heads, whichever loads them.
    """

    _heads: nn.Module | None = None
    _output: Any = None  # the target model's output head

    def _take(
        self, files: HeadFiles, num_heads: int, vocab_size: int | None, hidden_size: int
    ) -> None:
        """Take a checkpoint, and the part of the tree that its heads reach."""
        files.check_vocabulary(vocab_size, self.vocab_size)
        self._files, self._num_heads = files, num_heads
        self._loaded: Kept[nn.Module] = Kept()  # by dtype
        self.needs = Needs(hidden_layers=(FINAL,), hidden_size=hidden_size)
        self._tree = tree_of(self.config.num_nodes, num_heads, min(NUM_RANKS, self.vocab_size))
        self.max_nodes = self._tree.topology.num_nodes

    def _new_heads(self) -> nn.Module:
        raise NotImplementedError

    def check_target(self, target: TargetModel) -> None:
        """Check the model, and load the heads in its dtype, once."""
        super().check_target(target)
        self._bind(target)

    def for_target(self, target: TargetModel) -> Drafter:
        """Load the heads in the target model's dtype, once; return this drafter."""
        self._bind(target)
        return self

    def _bind(self, target: TargetModel) -> None:
        self._heads = self._loaded.get(target.dtype, lambda: self._load(target))
        self._output = target.model.get_output_embeddings()

    def _load(self, target: TargetModel) -> nn.Module:
        self.check_config(target.config)
        with torch.device("meta"):
            heads = self._new_heads()
        return self._files.load_into(heads, target.dtype, self.device)

    def describe(self) -> str:
        return f"{self._num_heads} heads, a tree of {self.max_nodes - 1} nodes"
