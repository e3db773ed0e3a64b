"""Vanilla: plain decoding, as the empty draft."""
