"""Steps in static shapes, compiled or replayed as CUDA graphs."""
