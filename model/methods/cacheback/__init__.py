"""Cacheback: a tree of what lately followed the last token, from a bounded table of n-grams (arXiv 2511.21699)."""

from ...options import Words

WORDS = {"cacheback": Words("Cacheback")}
