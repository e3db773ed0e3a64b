"""SuffixDecoding (arXiv 2411.04975)."""
