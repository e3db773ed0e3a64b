"""Vanilla: plain decoding, as the empty draft."""

from ...options import Words

WORDS = {"vanilla": Words("Vanilla (autoregressive)", published="AR")}
