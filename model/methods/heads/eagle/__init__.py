"""EAGLE, EAGLE-2, EAGLE-3 and P-EAGLE: a small draft network that continues the target model's hidden states."""

from ....options import Words

OPTIONS = {"depth": "trees of {} levels", "width": "{} nodes read on a level"}
WORDS = {
    "eagle": Words("EAGLE", published="EAGLE"),
    "eagle2": Words("EAGLE-2", published="EAGLE2", options=OPTIONS),
    "eagle3": Words("EAGLE-3", published="EAGLE3", options=OPTIONS),
    "peagle": Words("P-EAGLE", options={"num_guesses": "{} guesses"}),
}
