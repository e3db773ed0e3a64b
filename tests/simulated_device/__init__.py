"""The path of a GPU, run on simulated GPUs."""
