"""Decoder layers as short programs: taken from the stock modules, run without Python between their operations."""
