"""The table of `generate`'s arguments in the page about the library.

Run: pytest tests/scripts/test_generate_arguments.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

import scripts.generate_arguments
from model.api.generate_arguments import table
from model.commands.command_line import UserError
from scripts.generate_arguments import main, with_table


def test_the_page_is_as_the_list_says() -> None:
    assert main(["--check"]) == 0


def test_another_table_is_found_and_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "library.md"
    page.write_text("a\n<!-- arguments of generate -->\nstale text\n<!-- end of arguments -->\nb\n")
    monkeypatch.setattr(scripts.generate_arguments, "PAGE", page)
    with pytest.raises(
        UserError, match=r"differs from the list; run python -m scripts\.generate_arg"
    ):
        main(["--check"])
    assert main([]) == 0 and main(["--check"]) == 0
    assert table() in page.read_text() and "stale text" not in page.read_text()
    with pytest.raises(UserError, match="has no table between"):
        with_table("no marks")
