"""REST, retrieval-based speculative decoding (arXiv 2311.08252)."""
