"""Tiles of the products by the number of nodes: what changes speed and no bit.

The sizes were the fastest of those tried on one H200, 7B shape, float16. A sum runs along K in one accumulator,
whatever the tile. Only the number of parts orders it otherwise, so that is fixed by the weight alone (`num_parts`).
"""

from __future__ import annotations

from typing import NamedTuple

# Outputs of the smallest tile, of which a GPU of some hundred processors wants as many.
OUTPUTS = 64
ENOUGH_TILES = 192
MOST_PARTS, FEWEST_COLUMNS = 8, 512


class Tile(NamedTuple):
    """A tile of a product, and how it is run."""

    outputs: int
    columns: int  # of the weight at a time
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Tiles of the products of a pass."""

    nodes: tuple[int, int]  # of a tile, as two operands; the second may be 0
    qkv: Tile
    out: Tile
    gated: Tile
    down: Tile
    head: Tile


_WIDE, _FLAT = Tile(64, 128, 4, 3), Tile(64, 64, 4, 4)
_DEEP = Tile(64, 128, 4, 4)
_FEW = Tiles((16, 0), _DEEP, _WIDE, _WIDE, Tile(64, 64, 4, 6), _DEEP)
_MANY = Tiles((64, 0), Tile(128, 64, 8, 6), _FLAT, _FLAT, _FLAT, _FLAT)
# By the most nodes of a pass; larger ones have several tiles of the last.
TILES = {
    16: _FEW,
    32: _FEW._replace(nodes=(32, 0), qkv=_WIDE, gated=_FLAT),
    64: _MANY,
    96: _MANY._replace(nodes=(64, 32)),
    128: _MANY._replace(nodes=(128, 0)),
}


def tiles_of(num_nodes: int) -> Tiles:
    """Return the tiles of a pass over so many nodes."""
    return next((tiles for most, tiles in TILES.items() if num_nodes <= most), TILES[128])


def num_parts(num_outputs: int, num_columns: int) -> int:
    """Return into how many parts a weight's columns are split: enough for a whole GPU to read a small weight."""
    parts, tiles = 1, -(-num_outputs // OUTPUTS)
    while (
        parts < MOST_PARTS
        and tiles * parts < ENOUGH_TILES
        and num_columns // (2 * parts) >= FEWEST_COLUMNS
    ):
        parts *= 2
    return parts
