"""Answer questions with a method: python -m evaluation.inference NAME --help.

Spec-Bench's commands, one a method, are the same: python -m evaluation.inference_NAME.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from evaluation.inference import command
from model.commands.command_line import OptionParser, run_command
from model.methods import METHODS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the inference command of the method that the first word names; return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = OptionParser(
        prog="python -m evaluation.inference",
        usage="%(prog)s NAME [options of the method; NAME --help lists them]",
        description="Answer questions with a method, into Spec-Bench's answer format.",
        epilog=f"methods: {', '.join(METHODS)}" if words[:1] in (["-h"], ["--help"]) else None,
    )
    parser.add_argument("NAME", help="a method, or package.module:DrafterClass")
    name: str = parser.parse_args(words[:1]).NAME
    return command.main(name, words[1:], f"evaluation.inference {name}")


if __name__ == "__main__":
    run_command(main)
