"""The table of model families in `docs/models.md`, written from what the tests check.

Run: python -m tests.model.list_models > docs/models.md
"""

from __future__ import annotations

from tests.model.families import FAMILIES
from tests.model.family import Family

VERSIONS = ("4.57.6", "5.23.0")
OUTCOMES = {
    "trees": "trees",
    "chains": "chains only",
    "refused": "refused",
    "absent": "not there",
}
INTRODUCTION = f"""# Models

What is done with which model family, checked with tiny random models under transformers
{VERSIONS[0]} and {VERSIONS[1]} by `tests/model/test_families.py`: for every family that is not
refused and every method, the tokens equal `generate(do_sample=False)` in float32, and the logits of
every node of a tree (or chain) equal those of a plain forward pass.

- **trees**: drafts may branch. Attention implementations other than `sdpa` and `eager` take no tree
  mask and are replaced, with a warning.
- **chains only**: drafts are chains, verified with the model's own causal mask; the output is as
  exact, the drafts are smaller.
- **refused**: a rejected draft could not be rolled back; the error says why in one line.

A family that is not in the table is tested when it is loaded: a chain and a tree of random tokens
are compared with plain forward passes, and the model is refused, or set to chains only, where they
differ (`model/self_test.py`).

Texts end at the context the model declares. With longrope they end at
`original_max_position_embeddings`, where the frequencies change, unless the prompt is longer than
that by two tokens or more. Llama 4 scales the queries of some layers by key index, in steps of
`floor_scale`: a step whose tree would reach over such a border drafts a chain.

The table is written by `python -m tests.model.list_models > docs/models.md`.
"""


def row(family: Family) -> str:
    """Return a family's line of the table."""
    before, now = family.outcome_in_4 or family.outcome, family.outcome
    cells = (family.name, f"`{family.config}`", OUTCOMES[before], OUTCOMES[now], family.note)
    return f"| {' | '.join(cells)} |"


def render() -> str:
    """Return the text of the page."""
    head = f"| family | config | {' | '.join(VERSIONS)} | remark |\n|---|---|---|---|---|"
    return "\n".join([INTRODUCTION, head, *map(row, FAMILIES), ""])


if __name__ == "__main__":
    print(render(), end="")
