"""Hybrid: one tree from all sources of guesses."""

from ...options import Words

WORDS = {
    "hybrid": Words(
        "Hybrid",
        options={
            "head": "with heads {}",
            "neighbours": "state compared with {} of the same token",
            "table_bits": "a table of 2^{} rows",
        },
    )
}
