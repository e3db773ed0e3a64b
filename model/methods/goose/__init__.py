"""Goose: a spine of guesses from the text, with branches from recycled successors (arXiv 2604.02047)."""

from ...options import Words

WORDS = {"goose": Words("Goose")}
