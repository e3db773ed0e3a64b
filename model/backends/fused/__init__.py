"""Passes of a decoder on a GPU in nine kernels a layer, with the same bits for every row."""
