"""Proofs when a model is loaded, and signs that it has changed since."""
