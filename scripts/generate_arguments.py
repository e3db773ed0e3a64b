"""Write the table of `generate`'s arguments in docs/library.md from the list that the library decides by.

Run:
    python -m scripts.generate_arguments            # writes docs/library.md
    python -m scripts.generate_arguments --check    # only says whether it is as the list is
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from model.api.generate_arguments import table
from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.files import write_whole

PAGE = Path(__file__).resolve().parents[1] / "docs/library.md"
BEGIN, END = "<!-- arguments of generate -->", "<!-- end of arguments -->"
MARKED = re.compile(rf"(?<={BEGIN}\n).*?(?={END})", re.DOTALL)


def with_table(text: str) -> str:
    """Return a page with its table made anew.

    Raises:
        UserError: if the page has no marks.
    """
    found = MARKED.search(text)
    if not found:
        raise UserError(f"docs/library.md: has no table between '{BEGIN}' and '{END}'")
    return f"{text[: found.start()]}{table()}\n{text[found.end() :]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = OptionParser(prog="python -m scripts.generate_arguments", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it differs")
    options = parser.parse_args(argv)
    before = PAGE.read_text(encoding="utf-8")
    after = with_table(before)
    if options.check and before != after:
        raise UserError(
            "docs/library.md: differs from the list; run python -m scripts.generate_arguments"
        )
    if not options.check:
        write_whole(PAGE, after)
    return 0


if __name__ == "__main__":
    run_command(main)
