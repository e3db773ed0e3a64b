"""Suffix automaton decoding (arXiv 2411.10666)."""

from ...options import Words

WORDS = {
    "samd": Words(
        "SAM decoding",
        options={
            "automaton": "the automaton of a corpus, {}",
            "fallback=none": "alone",
            "fallback=recycling": "short matches left to Token Recycling",
            "threshold": "matches from {} tokens on",
            "tokens_per_match": "{} tokens drafted for each token matched",
        },
        variants={"budget=auto": "as many tokens as pay (ours)"},
    )
}
