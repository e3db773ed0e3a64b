"""Fused passes, run by Triton's interpreter on a CPU."""
