"""RACER: retrieval first, recycled logits in the rest of the tree (arXiv 2604.14885)."""

from ...options import Words

WORDS = {"racer": Words("RACER")}
