"""The most frequent beginnings of sorted continuations, as a draft.

Shapes: M continuations, L tokens of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Path = tuple[int, ...]


def most_frequent(continuations: np.ndarray, most: int) -> list[Path]:
    """Return the most frequent beginnings, the most frequent first; of equals the alphabetically first.

    So a beginning comes after its own beginnings.

    Args:
        continuations: sorted tokens, int [M, L], -1 where one is over.
        most: beginnings wanted.
    """
    is_new = np.ones(continuations.shape, dtype=bool)
    # A row begins a new run of d tokens where one of its first d differs from the row before.
    is_new[1:] = np.logical_or.accumulate(continuations[1:] != continuations[:-1], axis=1)
    counts = np.zeros(continuations.shape, dtype=np.int64)
    for depth in range(continuations.shape[1]):
        begins = np.flatnonzero(is_new[:, depth])
        counts[begins, depth] = np.diff(begins, append=len(continuations))
    counts[continuations < 0] = 0
    # Row by row and from left to right is the alphabetical order.
    flat = counts.ravel()
    if np.count_nonzero(flat) > most:
        threshold = np.partition(flat, -most)[-most]
        places = np.flatnonzero(flat >= threshold)
    else:
        places = np.flatnonzero(flat)
    ranked = places[np.argsort(-flat[places], kind="stable")][:most]
    rows, depths = np.divmod(ranked, continuations.shape[1])
    return [
        tuple(continuations[row, : depth + 1].tolist())
        for row, depth in zip(rows.tolist(), depths.tolist(), strict=True)
    ]


def cut(paths: Sequence[Path], most: int) -> list[Path]:
    """Cut paths as the authors' code does.

    Those with the most different tokens go, until all paths together have at most `most`; of equals the
    one that was ranked last.
    """
    left = dict.fromkeys(paths)
    total = sum(len(set(path)) for path in paths)
    for path in sorted(reversed(paths), key=lambda path: -len(set(path))):
        if total <= most:
            break
        total -= len(set(path))
        del left[path]
    return list(left)


def chain(paths: Sequence[Path]) -> list[Path]:
    """Return the path that takes the most frequent token each time."""
    taken: list[Path] = []
    for path in paths:
        if path[:-1] == (taken[-1] if taken else ()):
            taken.append(path)
    return taken
