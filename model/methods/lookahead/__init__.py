"""Lookahead decoding (arXiv 2402.02057)."""

from ...options import Words

WORDS = {
    "lookahead": Words(
        "Lookahead",
        options={
            "guess": "{} n-grams verified in a step",
            "level": "n-grams of {} tokens",
            "window": "a window of {} columns",
        },
        variants={"budget=auto": "as many tokens as pay (ours)"},
    )
}
