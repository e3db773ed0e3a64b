"""Faster kernels for passes over a few rows, chosen by measurement."""
