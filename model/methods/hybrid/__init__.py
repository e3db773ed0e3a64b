"""Hybrid: one tree from all sources of guesses."""
