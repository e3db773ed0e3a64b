"""Links of the pages lead somewhere, and the site's navigation names every page.

The site itself is built, with all links checked, by `bash scripts/docs.sh`, which needs packages of its own.

Run: pytest tests/test_pages.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import model

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    file
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "data/*.md", "data/demo/*/*.md")
    for file in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    titles = (line.lstrip("#").strip().lower() for line in text.splitlines() if line[:1] == "#")
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    for link in LINK.findall(text):
        if not link.startswith(("http:", "https:", "mailto:")):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), f"{link}: no such file"
            if anchor and target.suffix == ".md":
                assert anchor in anchors(target), f"{link}: no such heading"


def test_the_navigation_names_every_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    named = re.findall(r"(\S+\.md)$", navigation, re.MULTILINE)
    places = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md"), ROOT / "README.md"]
    assert sorted(named) == sorted(str(page.relative_to(ROOT)) for page in places)


def test_the_reference_has_a_sentence_for_every_public_name() -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    before, *entries = re.split(r"^::: (\S+)\n(?: {4}.*\n)?", text, flags=re.MULTILINE)
    sentences = [before, *entries[1::2]]  # between the directives, which GitHub does not show
    for name, said in zip(entries[::2], sentences, strict=False):
        assert re.search(r"[.:]\s*$", said), f"{name}: a sentence comes before it"
    named = {name.removeprefix("token_recycling.") for name in entries[::2]}
    named |= set(re.findall(r"`(\w+)", text))
    assert set(model.__all__) - {"__version__"} <= named
