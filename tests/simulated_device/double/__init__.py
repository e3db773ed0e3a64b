"""The parts of simulated GPUs: tensors, operations, graphs, and accounts of launches, copies and waits."""
