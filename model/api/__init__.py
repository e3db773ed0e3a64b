"""The library's front: decoders of text, the callable for transformers' `generate`, streams, saved memory."""
