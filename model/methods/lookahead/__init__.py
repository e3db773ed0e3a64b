"""Lookahead decoding (arXiv 2402.02057)."""
