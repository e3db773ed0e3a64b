"""LogitSpec: the last logits guess the token after the next one (arXiv 2507.01449)."""
