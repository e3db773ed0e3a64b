"""The tables of model families in `docs/models.md` and `README.md`, written from what the tests
check.

Run: python -m tests.model.list_models
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.model.families import FAMILIES
from tests.model.family import Family

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "python -m tests.model.list_models"
BEGIN, END = "<!-- families:begin -->", "<!-- families:end -->"
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
differ (`model/engine/self_test.py`).

Texts end at the context the model declares. With longrope they end at
`original_max_position_embeddings`, where the frequencies change, unless the prompt is longer than
that by two tokens or more. Llama 4 scales the queries of some layers by key index, in steps of
`floor_scale`, and PhiMoE in 4.57 counts keys at the border of longrope: a step whose tree would
reach over such a border drafts a chain.

The table is written by `{COMMAND}`.
"""


def row(family: Family) -> str:
    """Return a family's line of the page's table."""
    before, now = family.outcome_in_4 or family.outcome, family.outcome
    cells = (family.name, f"`{family.config}`", OUTCOMES[before], OUTCOMES[now], family.note)
    return f"| {' | '.join(cells)} |"


def render() -> str:
    """Return the text of the page."""
    head = f"| family | config | {' | '.join(VERSIONS)} | remark |\n|---|---|---|---|---|"
    return "\n".join([INTRODUCTION, head, *map(row, FAMILIES), ""])


def render_section() -> str:
    """Return the README's table: the families of each verdict and reason, between the markers."""
    groups: dict[tuple[str, str], list[Family]] = {}
    for family in FAMILIES:
        groups.setdefault((_verdict(family), _reason(family)), []).append(family)
    rows = [
        f"| {_short_names(families)} | {verdict} | {reason} |"
        for (verdict, reason), families in groups.items()
    ]
    return "\n".join([BEGIN, "| family | verdict | reason |", "|---|---|---|", *rows, END])


def with_section(text: str) -> str:
    """Return a README with the table of today between its markers.

    Raises:
        ValueError: if the two markers are not there once each, in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in before + after:
        raise ValueError(f"README.md: got no single pair of markers; allowed: {BEGIN} ... {END}")
    return before + render_section() + after


def _verdict(family: Family) -> str:
    """Return what is done with a family, with the older version's verdict where that differs."""
    verdict = OUTCOMES[family.outcome]
    is_other = family.outcome_in_4 not in ("", "absent", family.outcome)
    return verdict + (f" ({OUTCOMES[family.outcome_in_4]} in 4.57)" if is_other else "")


def _reason(family: Family) -> str:
    """Return why a family's drafts may not branch, in either version; empty where they may."""
    if family.outcome != "trees":
        return family.note
    return "a tree fails the self-test in 4.57" if family.outcome_in_4 == "chains" else ""


def _short_names(families: Iterable[Family]) -> str:
    """Return the names of families on one line, the variants of one in brackets after it."""
    variants: dict[str, list[str]] = {}
    for family in families:
        name, _, variant = family.name.partition(", ")
        variants.setdefault(name, [])
        if variant:
            variants[name].append(variant)
    return ", ".join(
        f"{name} ({', '.join(found)})" if found else name for name, found in variants.items()
    )


def main() -> None:
    """Write both tables."""
    readme = ROOT / "README.md"
    text = with_section(readme.read_text(encoding="utf-8"))
    readme.write_text(text, encoding="utf-8")
    (ROOT / "docs/models.md").write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
