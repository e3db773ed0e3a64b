"""PLD: prompt lookup decoding; ToolSpec, which looks up after what is forced; AdaPLD, which asks the states."""

from ...options import Words

WORDS = {
    "pld": Words(
        "Prompt lookup (PLD)",
        published="PLD",
        variants={"budget=auto": "as many tokens as pay (ours)"},
    ),
    "toolspec": Words("ToolSpec", published="ToolSpec"),
    "adapld": Words("AdaPLD", published="AdaPLD"),
}
