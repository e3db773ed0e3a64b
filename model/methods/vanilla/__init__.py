"""Plain decoding: the empty draft."""
