"""PLD: prompt lookup decoding."""

from ...options import Words

WORDS = {"pld": Words("Prompt lookup (PLD)", published="PLD")}
