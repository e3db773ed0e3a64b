"""One forward pass: its masks, kernels, cache layout, hidden states and read-out."""
