"""PLD: prompt lookup decoding; and ToolSpec, which looks up after what a grammar forces."""

from ...options import Words

WORDS = {
    "pld": Words(
        "Prompt lookup (PLD)",
        published="PLD",
        variants={"budget=auto": "as many tokens as pay (ours)"},
    ),
    "toolspec": Words("ToolSpec", published="ToolSpec"),
}
