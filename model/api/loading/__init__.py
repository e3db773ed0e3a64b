"""Models and tokenizers for decoders, also of GGUF files and with quantised weights."""
