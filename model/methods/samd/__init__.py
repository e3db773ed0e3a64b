"""Suffix automaton decoding (arXiv 2411.10666)."""
