"""SuffixDecoding (arXiv 2411.04975)."""

from ...options import Words

WORDS = {
    "suffix": Words(
        "SuffixDecoding",
        options={
            "max_cached_answers": "at most {} answers kept",
            "max_spec_factor": "{} tokens drafted for each token matched",
            "max_spec_offset": "{} tokens drafted besides",
            "max_tree_depth": "match and draft of at most {} tokens",
            "min_token_prob": "drafted tokens of probability {} or more",
            "shape=path": "a chain drafted",
            "shape=tree": "a tree drafted",
        },
    )
}
