"""ESP: masks appended to the pass, of the prompt's mean embedding, guess the tokens to come (arXiv 2603.17942)."""

from ...options import Words

WORDS = {"esp": Words("ESP")}
