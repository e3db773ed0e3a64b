"""LogitSpec: the last logits guess the token after the next one (arXiv 2507.01449)."""

from ...options import Words

WORDS = {"logitspec": Words("LogitSpec")}
