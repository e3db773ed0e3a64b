"""CPU kernels for passes over a few rows, used where measured faster."""
