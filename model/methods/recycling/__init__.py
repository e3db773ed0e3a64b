"""Token Recycling (arXiv 2408.08696)."""

from ...options import Words

WORDS = {"recycling": Words("Token Recycling", published="Recycling")}
