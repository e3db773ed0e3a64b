"""Speculative sampling with a smaller draft model."""
