"""Tree templates: the rank of the guess for each node of a draft.

A template is a list of rank paths: `[0, 2]` is the third most likely successor of the most likely
successor of the root. It is read from JSON: either a list of paths, or an object with a key "paths".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from ..engine.budget import MAX_DRAFT, DraftBudget
from ..engine.tree import TreeTopology

# A valid file, even with the most paths, is far smaller.
MAX_BYTES = 16 * 2**20


class TreeTemplate:
    """A checked template of rank paths without the root, in any order: nodes by level, each with parent and rank.

    Raises:
        ValueError: naming the wrong path: empty, not of integers >= 0, duplicated, or without its ancestor.
    """

    def __init__(self, paths: Sequence[Sequence[int]], name: str) -> None:
        self.name = name
        self.paths = _checked_paths(paths, name)
        node_of = {(): 0} | {path: node for node, path in enumerate(self.paths, start=1)}
        self.topology = TreeTopology.from_parents(
            (-1, *(node_of[path[:-1]] for path in self.paths))
        )
        self.ranks = (0, *(path[-1] for path in self.paths))

    def check_ranks(self, k: int) -> None:
        """Raise ValueError, naming the path, if a rank does not exist in rows of `k` successors."""
        for path in self.paths:
            if max(path) >= k:
                raise ValueError(
                    f"tree template {self.name}: path {list(path)} uses rank {max(path)}; allowed: 0 to {k - 1} "
                    f"(output_id_topk {k}); give output_id_topk {1 + max(self.ranks)} or more, or another "
                    "tree_version, such as auto"
                )

    def within(self, budget: DraftBudget) -> TreeTemplate:
        """Return the part of the template that the budget allows; the template itself if it fits."""
        if self.topology.max_depth <= budget.max_depth and not budget.chain_only:
            return self
        return _cut(self, min(budget.max_depth, self.topology.max_depth), budget.chain_only)


@lru_cache(maxsize=256)
def _cut(template: TreeTemplate, depth: int, chain_only: bool) -> TreeTemplate:
    """Cut a template at a depth; a chain keeps the best successor at every level."""
    if chain_only:
        return TreeTemplate([(0,) * length for length in range(1, depth + 1)], template.name)
    return TreeTemplate([path for path in template.paths if len(path) <= depth], template.name)


def _checked_paths(paths: Sequence[Sequence[int]], name: str) -> list[tuple[int, ...]]:
    if len(paths) > MAX_DRAFT:
        raise ValueError(
            f"tree template {name}: got {len(paths)} paths; allowed: at most {MAX_DRAFT}"
        )
    seen: set[tuple[int, ...]] = set()
    for path in paths:
        is_path = isinstance(path, (list, tuple)) and len(path) > 0
        if not is_path or not all(type(rank) is int and rank >= 0 for rank in path):
            raise ValueError(
                f"tree template {name}: got the path {path!r:.60}; allowed: a non-empty list of "
                "ranks 0, 1, 2, ..."
            )
        if tuple(path) in seen:
            raise ValueError(f"tree template {name}: path {list(path)} occurs twice; remove one")
        seen.add(tuple(path))
    for path in seen:
        if len(path) > 1 and path[:-1] not in seen:
            raise ValueError(
                f"tree template {name}: path {list(path)} lacks its ancestor {list(path[:-1])}; "
                "add that path"
            )
    return sorted((tuple(path) for path in paths), key=len)


def read_rank_paths(file: Path, name: str) -> list[list[int]]:
    """Read unchecked rank paths from a JSON file, in its order.

    Raises:
        ValueError: with the name, if the file cannot be read or parsed, or holds no list, or an empty one.
    """
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(
            f"tree template {name}: has {file.stat().st_size} bytes; allowed: at most {MAX_BYTES}"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"tree template {name}: cannot be read as JSON: {error}") from error
    paths = content.get("paths") if isinstance(content, dict) else content
    if not isinstance(paths, list):
        raise ValueError(
            f"tree template {name}: got {type(paths).__name__}; allowed: a list of rank paths, "
            'or an object with a list under "paths"'
        )
    if not paths:
        raise ValueError(f"tree template {name}: got no paths; allowed: one rank path or more")
    return paths
