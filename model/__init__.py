"""Train-free speculative decoding for any decoder-only Hugging Face model, unmodified."""
