"""The public library: decoders, the callable for transformers' `generate`, text streams, saved memory."""
