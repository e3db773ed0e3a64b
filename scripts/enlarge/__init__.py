"""Larger models that compute what a small one computes."""
