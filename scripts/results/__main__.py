r"""Store answers, and make every table of results on the pages from the stored files.

A pack holds the answer files of one comparison, compressed. A page names its packs between two marks, and the
table between them is made from these files alone: no figure is copied by hand, and equality and intervals can be
computed again. Each folder of a pack is a comparison of its own. Kinds of tables: summary, tasks, rulers, programs
(over another program, such as llama.cpp), report, batches (by batch size), nodes (by drafted nodes, of a pack
with a folder a size) and tokens (the ten methods of such packs that accept most, without the clock). A table by
hand stands between `<!-- figures of FILE -->` and `<!-- end of figures -->`; a test looks for its figures there.

    <!-- table: summary of docs/results/demo.tar.xz -->
    <!-- end of table -->

Examples:
    python -m scripts.results pack answers docs/results/demo.tar.xz
    python -m scripts.results unpack docs/results/demo.tar.xz answers
    python -m scripts.results tables
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.files import check_output, write_whole
from model.options import unknown_name
from scripts.results.pack import pack, unpacked
from scripts.results.tables import TABLES

ROOT = Path(__file__).resolve().parents[2]
MARKED = re.compile(r"(<!-- table: (\w+) of ([^>]+?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def pages() -> list[Path]:
    """Return the pages that may have tables of results; what --help says, marks included, has none."""
    docs = ROOT / "docs"
    return [ROOT / "README.md", *sorted({*docs.rglob("*.md")} - {docs / "help.md"})]


def with_tables(text: str, folder: Path) -> str:
    """Return a page with its tables made anew from the files that they name, relative to a folder.

    Raises:
        UserError: if a kind of table is unknown, or a file cannot be read.
    """

    def made(found: re.Match[str]) -> str:
        begin, kind, names, end = found.groups()
        if kind not in TABLES:
            raise UserError(unknown_name("table", kind, list(TABLES)))
        return f"{begin}{TABLES[kind]([folder / name for name in names.split()])}\n{end}"

    return MARKED.sub(made, text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = OptionParser(prog="python -m scripts.results", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    to_pack = commands.add_parser("pack", help="compress a folder's answer files")
    to_pack.add_argument("folder", type=Path, metavar="DIR", help="answers, subfolders included")
    to_pack.add_argument("pack", type=Path, metavar="PACK", help="file to write (.tar.xz)")
    from_pack = commands.add_parser("unpack", help="write the answer files of a pack to a folder")
    from_pack.add_argument("pack", type=Path, metavar="PACK", help="file to read")
    from_pack.add_argument("folder", type=Path, metavar="DIR", help="folder to make")
    commands.add_parser("tables", help="make the tables of all pages")
    args = parser.parse_args(argv)
    if args.command == "pack":
        check_output(args.pack, "pack")
        pack(args.folder, args.pack)
    elif args.command == "unpack":
        if args.folder.exists():
            raise UserError(f"folder: got {args.folder}, which exists; allowed: a new one")
        with unpacked(args.pack) as folder:
            shutil.copytree(folder, args.folder)
    else:
        for page in pages():
            text = page.read_text(encoding="utf-8")
            if (made := with_tables(text, ROOT)) != text:
                write_whole(page, made)
                print(f"{page.relative_to(ROOT)}: written")
    return 0


if __name__ == "__main__":
    run_command(main)
