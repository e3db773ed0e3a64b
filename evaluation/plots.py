"""Pictures of answer files, as PNG and SVG.

For each group of comparable answers (`scoring/comparable.py`): speed-up per task with intervals, how many
tokens a step brings, which nodes of the draft tree are accepted, and how acceptance grows with the
questions seen. The leaderboard's page shows the same pictures.

Run:
    python -m evaluation.plots data/demo/model_answer --out plots
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from evaluation.reporting.options import add_answer_options, answer_paths, given_groups
from evaluation.reporting.pictures import group_pictures, write_picture
from model.commands.command_line import OptionParser, run_command

EXAMPLES = """\
examples:
  python -m evaluation.plots data/demo/model_answer --out plots
  python -m evaluation.plots vanilla.jsonl hot.jsonl cold.jsonl --out plots
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write every picture and name the files on stdout; return the exit code."""
    options = _parse(argv)
    left_out: list[str] = []
    groups = given_groups(options, answer_paths(options.paths, options.base), left_out)
    for reason in left_out:
        print(f"WARNING: left out: {reason}", file=sys.stderr)
    for picture in chain.from_iterable(group_pictures(groups)):
        for file in write_picture(picture, Path(options.out)):
            print(file)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(
        prog="python -m evaluation.plots",
        description="Draw answer files, as PNG and SVG.",
        epilog=EXAMPLES,
    )
    add_answer_options(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the pictures")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_command(main)
