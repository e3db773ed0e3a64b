"""Kernels for passes over a few rows: our own on a CPU, fewer launches on a GPU."""
