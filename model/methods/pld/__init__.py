"""PLD: prompt lookup decoding."""

from ...options import Words

WORDS = {
    "pld": Words(
        "Prompt lookup (PLD)",
        published="PLD",
        variants={"budget=auto": "as many tokens as pay (ours)"},
    )
}
