"""Steps in static shapes, replayed as CUDA graphs."""
