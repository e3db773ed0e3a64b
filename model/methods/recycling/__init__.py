"""Token Recycling (arXiv 2408.08696)."""

from ...options import Words

WORDS = {
    "recycling": Words(
        "Token Recycling",
        published="Recycling",
        variants={
            "tree_version=auto": "tree sized to the device (ours)",
            "policy=original": "as published",
            "policy=average": "averaged rows (ours)",
            "policy=accepted-last": "accepted rows last (ours)",
            "policy=accepted-only": "accepted rows only (ours)",
        },
    ),
    "recycling-averaged": Words(
        "Token Recycling, averaged rows (ours)",
        variants={"tree_version=auto": "tree sized to the device"},
    ),
}
