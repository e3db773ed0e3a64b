"""Larger models with the logits of a small one."""
