"""Random cases against transformers' own `generate`: `python -m tests.fuzz --help`."""
