"""Token Recycling (arXiv 2408.08696)."""
