"""Successor chain, a method in a package of its own."""

from token_recycling.options import Words

# The method's title in tables, and the words of its options.
WORDS = {"successor_chain": Words("Successor chain", options={"length": "{} guesses a step"})}
