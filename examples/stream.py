"""Stream an answer, one piece for each step. A step emits one token or more.

Run:
    python examples/stream.py [MODEL]
"""

import sys
from pathlib import Path

from token_recycling import TokenRecycling

DEMO_MODEL = Path(__file__).parents[1] / "data/demo/model"


def main(model_path=DEMO_MODEL, max_new_tokens=60):
    # The paper's tree. Without this option the tree is sized to the device, on a slow one to nothing.
    decoder = TokenRecycling.from_pretrained(model_path, tree_version="2.2.2")
    lengths = []
    for piece in decoder.stream(
        "USER: Write a short story about a boat. ASSISTANT:", max_new_tokens=max_new_tokens
    ):
        print(piece, end="", flush=True)  # whole characters; piece.token_ids are the step's tokens
        lengths.append(len(piece.token_ids))
    print(f"\ntokens of each step: {lengths}")


if __name__ == "__main__":
    main(*sys.argv[1:])
