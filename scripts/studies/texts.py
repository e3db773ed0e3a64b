"""Prompts whose answers repeat little, and prompts whose answers repeat much."""

from __future__ import annotations

import random

from evaluation.questions.questions import Question

WORDS = """
anchor barley candle dolphin ember falcon granite harbor island jasmine kettle lantern meadow needle
orchard pebble quiver ribbon saddle timber umbrella velvet willow yarrow zephyr bramble copper
drizzle feather glacier hammock ivory juniper marble nutmeg otter parchment
"""

CODE = (
    "def total(prices, tax):\n    result = 0\n    for price in prices:\n"
    "        result = result + price * (1 + tax)\n    return result\n",
    "def longest(words):\n    best = ''\n    for word in words:\n"
    "        if len(word) > len(best):\n            best = word\n    return best\n",
    "class Counter:\n    def __init__(self):\n        self.count = 0\n\n"
    "    def add(self, number):\n        self.count = self.count + number\n",
)
EDITS = (
    "Rename the variable {old} to {new} in this code and print the whole code again.",
    "Add a comment above every line of this code and print the whole code again.",
)
RENAMED = (("result", "amount"), ("best", "candidate"), ("number", "step"))

# Categories of a benchmark whose answers repeat little, and much.
LITTLE_CATEGORIES = ("translation",)
MUCH_CATEGORIES = ("summarization", "rag")


def made_up_questions() -> dict[str, list[Question]]:
    """Return questions by kind of text; the same ones every time."""
    source = random.Random(0)
    shuffled = [" ".join(source.sample(WORDS.split(), k=24)) for _ in range(4)]
    names = [
        ", ".join(
            "".join(source.choices("abcdefghjkmnpqrstuvwxyz0123456789_", k=9)) for _ in range(12)
        )
        for _ in range(4)
    ]
    edits = [
        f"{order.format(old=old, new=new)}\n\n{code}"
        for code, (old, new) in zip(CODE, RENAMED, strict=True)
        for order in EDITS
    ]
    return {
        "shuffled words": _questions(
            "words", [f"Go on with this list of words, in no order: {text}" for text in shuffled]
        ),
        "random identifiers": _questions(
            "names", [f"Go on with this list of random identifiers: {text}" for text in names]
        ),
        "code edits": _questions("edits", edits),
    }


def _questions(kind: str, prompts: list[str]) -> list[Question]:
    return [
        Question(f"{kind}-{number}", kind, (prompt,))
        for number, prompt in enumerate(prompts, start=1)
    ]
