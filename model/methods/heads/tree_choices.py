"""The static tree of Medusa and Hydra, and its first nodes: the most useful ones come first."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from ..growth.tree_template import TreeTemplate, read_rank_paths

NAME = "mc_sim_7b_63"
FILE = Path(__file__).parent / "templates" / f"{NAME}.json"
NUM_NODES, NUM_RANKS = 63, 10


@lru_cache(maxsize=16)
def tree_of(num_nodes: int, num_heads: int, num_ranks: int) -> TreeTemplate:
    """Return the first nodes of the tree, as far as heads and ranks reach; the same object on every call.

    A tiny vocabulary has fewer guesses after a node than the tree's 10 ranks.
    """
    first = read_rank_paths(FILE, NAME)[:num_nodes]
    kept = [path for path in first if len(path) <= num_heads and max(path) < num_ranks]
    return TreeTemplate(kept, NAME)
