"""A check of the GPU path: right and fast on this GPU, in ten minutes."""
