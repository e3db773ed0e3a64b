"""Write docs/help.md: what `--help` of every command says; and the table of arguments in docs/library.md.

Run: python -m scripts.help_page
"""

from __future__ import annotations

import io
import os
import re
import runpy
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

from model.api.generate_arguments import table
from model.commands.command_line import OptionParser, run_command
from model.commands.files import write_whole
from model.methods import BUILT_IN

PAGE = Path(__file__).resolve().parents[1] / "docs" / "help.md"
LIBRARY = PAGE.with_name("library.md")
TABLE = re.compile(
    "(?<=<!-- arguments of generate -->\n).*?(?=<!-- end of arguments -->)", re.DOTALL
)
WIDTH = 100
# One method has all options of an inference command on the page, the others their own.
INFERENCE, SHOWN = "evaluation.inference", "hybrid"
# Commands by what they are for; words after the module are given before --help.
COMMANDS = {
    "Use": ("model.chat", "model.generate", "model.serve", "model.build", "model.doctor"),
    "Answer questions": ("evaluation.compare", f"{INFERENCE} {SHOWN}", "evaluation.endpoint"),
    "Read answers": (
        *("evaluation.speed", "evaluation.leaderboard", "evaluation.equal"),
        *("evaluation.defects", "evaluation.convert", "evaluation.answers.merge"),
    ),
    "Check": ("evaluation.sampling_check",),
    "Record a model, judge methods without it": ("evaluation.record", "evaluation.replay"),
    "Get data and models": (
        *("scripts.download_data", "scripts.download_model"),
        *("scripts.build_datastore", "scripts.build_automaton", "scripts.train_heads"),
        *("scripts.enlarge", "scripts.export_custom_generate"),
    ),
    "Measure": ("scripts.gpu_check", "scripts.gpu_check.compiled"),
    "Keep results": (
        *("scripts.results", "scripts.results pack"),
        *("scripts.results unpack", "scripts.results tables"),
    ),
    "Make the demo model": ("scripts.demo_model", "scripts.demo_model.answers"),
    "Maintain the pages": ("scripts.help_page",),
}
OWN_OPTIONS = re.compile(r"^options of \S+:\n.*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
INTRODUCTION = """\
# Every command

Options may be written with dashes or underscores. This page is made by `python -m scripts.help_page`.
"""


def help_of(command: str) -> str:
    """Return what a command's `--help` says, without the line of usage, which repeats the options."""
    module, *words = command.split()
    said = io.StringIO()
    argv, width = [module, *words, "--help"], {"COLUMNS": str(WIDTH + 2)}
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.dict(os.environ, width),
        redirect_stdout(said),
        warnings.catch_warnings(),
    ):
        # A module that another one has imported is run again, which is meant here.
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as end:
            assert end.code in (0, None), command
    return said.getvalue().partition("\n\n")[2].rstrip()


def page() -> str:
    parts = [INTRODUCTION]
    for title, commands in COMMANDS.items():
        parts.append(f"## {title}\n")
        for command in commands:
            parts.append(f"### `python -m {command}`\n\n```text\n{help_of(command)}\n```\n")
            if command != f"{INFERENCE} {SHOWN}":
                continue
            parts.append(
                f"The other methods, `python -m {INFERENCE} NAME`, have these options of their own:\n"
            )
            for name in [name for name in BUILT_IN if name != SHOWN]:
                own = OWN_OPTIONS.search(help_of(f"{INFERENCE} {name}"))
                said = f"```text\n{own[0]}\n```" if own else "None."
                parts.append(f"#### {name}\n\n{said}\n")
    return "\n".join(parts)


def with_table(text: str) -> str:
    """Return the library's page with the table made anew from the list that the library decides by."""
    text, count = TABLE.subn(lambda _: f"{table()}\n", text)
    assert count == 1, "docs/library.md: has no place for the table of arguments"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    OptionParser(prog="python -m scripts.help_page", description=__doc__).parse_args(argv)
    write_whole(PAGE, page())
    write_whole(LIBRARY, with_table(LIBRARY.read_text(encoding="utf-8")))
    return 0


if __name__ == "__main__":
    run_command(main)
