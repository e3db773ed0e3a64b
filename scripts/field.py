r"""Compare all train-free methods on one loaded model, with 8 to 64 drafted nodes and with their defaults.

For each size `evaluation.compare` answers the questions with all methods in turn, into a folder of that size. Every
other option is one of `evaluation.compare`, such as --model-path, --dtype, --threads, --bench-name, --num-questions
and --runs. A method has one line in `LINES`. Token Recycling drafts the first nodes of the paper's tree: those with
the smallest sums of ranks. The answers of all sizes make one pack, whose table is `nodes` of `scripts.results`. A
command that was stopped goes on if it is given again.

Examples:
    python -m scripts.field --bench-name spec_bench --num-questions 40 --max-new-tokens 96 --threads 1 \
        --files eagle3=data/demo/eagle3 --out field
    python -m scripts.field --sizes 8 defaults --start cold --num-questions 4 --max-new-tokens 32 --out cold
    python -m scripts.results pack field docs/results/field-demo.tar.xz

Exit code: 0; 1 if a question failed; 2 if an option cannot be used.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from string import Formatter
from typing import NamedTuple

from evaluation import compare
from evaluation.inference.entrants import entrant_of
from evaluation.reporting.options import make_folder
from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.files import write_whole
from model.methods import METHODS, drafter_class
from model.methods.recycling.drafter import load_template
from model.options import unknown_name

DEFAULTS = "defaults"
# Lookahead's N, W and G of at most so many nodes, (N - 1)(N - 2 + W + G): of 15 settings those that accepted most
# on 16 questions (13 of Spec-Bench, 3 of MBPP, 96 tokens), 1.33, 1.39, 1.53 and 1.60 tokens a step.
LOOKAHEAD = {8: (2, 4, 4), 16: (2, 8, 8), 32: (3, 8, 7), 64: (3, 16, 15)}
SIZES = (*map(str, LOOKAHEAD), DEFAULTS)
# Methods without a line: they draft nothing, or with a second model.
OUTSIDE = ("vanilla", "sps")
TREE = "2.2.2"


class Line(NamedTuple):
    """A method of the comparison; {name} in its options is a file or folder that must be given."""

    options: str  # the method with its options
    # At a size further options: {n} nodes (as many as the method can draft), {tree} a template, {lookahead}.
    size: str = "--num-nodes {n}"

    @property
    def method(self) -> str:
        return self.options.split()[0]

    @property
    def needs(self) -> list[str]:
        """Names of the files without which it cannot run."""
        return [name for _, name, _, _ in Formatter().parse(self.options) if name]

    @property
    def can_be_cold(self) -> bool:
        """Whether it has no start of its own, and may forget: Token Recycling's published code never does."""
        return "--start" not in self.options and "--policy original" not in self.options

    @property
    def most_nodes(self) -> int:
        """Nodes of the largest tree that the method's options allow, such as 25 of EAGLE's fixed one."""
        options = fields(drafter_class(self.method).config_class)
        bounds = [item.metadata["most"] for item in options if item.name == "num_nodes"]
        return next(filter(None, bounds), sys.maxsize)


TREES, CHAIN = "--tree-version {tree}", "--num-pred-tokens {n}"
GOOSE = "--num-nodes {n} --max-extended-chain {n}"
LINES = (
    Line("hybrid --budget fixed"),
    Line("recycling", TREES),
    Line("recycling --policy original", TREES),
    Line("pld", CHAIN),
    Line("lookahead", "{lookahead}"),
    Line("samd --fallback none --match first", CHAIN),
    Line("samd --fallback none --match first --automaton {automaton}", CHAIN),
    Line("samd --match first --policy original", f"{CHAIN} {TREES}"),
    Line("samd", f"{CHAIN} {TREES}"),
    Line("suffix"),
    Line("suffix --shape tree"),
    Line("rest --datastore {datastore}"),
    Line("logitspec"),
    Line("racer"),
    Line("goose", GOOSE),
    Line("goose --start hot", GOOSE),
    Line("cacheback"),
    Line("esp"),
    # Trained heads, where they are given.
    Line("medusa --heads {medusa}"),
    Line("hydra --heads {hydra}"),
    Line("eagle --heads {eagle}"),
    Line("eagle2 --heads {eagle}"),
    Line("eagle3 --heads {eagle3}"),
    Line("hybrid --budget fixed --head eagle3={eagle3}"),
)
# At its own defaults the hybrid drafts as many nodes as pay.
AT_DEFAULTS = (*LINES, Line("hybrid"))


def methods(size: str, files: Mapping[str, str], tree: Path, is_cold: bool) -> list[str]:
    """Return the methods of a size as `evaluation.compare` takes them, the baseline first.

    Args:
        size: one of `SIZES`.
        files: files and folders by name; a line that needs another one is left out.
        tree: the file of the size's template.
        is_cold: whether methods forget before each question what they keep across questions.
    """
    names = {name: shlex.quote(file) for name, file in files.items()}
    found = []
    for line in AT_DEFAULTS if size == DEFAULTS else LINES:
        if not set(line.needs) <= set(files) or (is_cold and not line.can_be_cold):
            continue
        words = line.options.format(**names)
        if size != DEFAULTS:
            level, window, guess = LOOKAHEAD[int(size)]
            lookahead = f"--level {level} --window {window} --guess {guess}"
            fitting = min(int(size), line.most_nodes)
            given = line.size.format(n=fitting, tree=shlex.quote(str(tree)), lookahead=lookahead)
            words = f"{words} {given}"
        found.append(_cold(words) if is_cold else words)
    return ["vanilla", *found]


def _cold(words: str) -> str:
    """Return a method with its memory emptied before each question, where it may keep one."""
    config = entrant_of(words).config
    has_memory = hasattr(config, "start") and getattr(config, "fallback", "") != "none"
    return f"{words} --start cold" if has_memory else words


def write_tree(size: int, file: Path) -> None:
    """Write the first nodes of the paper's tree, those with the smallest sums of ranks, as a template."""
    paths = load_template(TREE).paths
    first = sorted(paths, key=lambda path: (sum(path) + len(path), len(path), path))[:size]
    write_whole(file, json.dumps({"paths": sorted(first, key=len)}) + "\n")


def files_of(given: Sequence[str]) -> dict[str, str]:
    """Return files by their names, from NAME=FILE.

    Raises:
        UserError: if a name has no use, or a file is not there.
    """
    known = sorted({name for line in LINES for name in line.needs})
    files = {}
    for words in given:
        name, _, file = words.partition("=")
        if not file:
            raise UserError(f"files: got {words!r}; allowed: NAME=FILE")
        if name not in known:
            raise UserError(unknown_name("files", name, known))
        if not Path(file).exists():
            raise UserError(f"files: got {words}; there is no such file or folder")
        files[name] = file
    return files


def left_out(files: Mapping[str, str]) -> list[str]:
    """Name the lines whose files are not given, each with what to give, and the methods that have no line."""
    without = [
        f"{line.method} (give --files {' '.join(f'{name}=FILE' for name in line.needs)})"
        for line in LINES
        if not set(line.needs) <= set(files)
    ]
    known = {*OUTSIDE, *(line.method for line in LINES)}
    return [*without, *(f"{name} (it has no line)" for name in METHODS if name not in known)]


def build_parser() -> argparse.ArgumentParser:
    parser = OptionParser(prog="python -m scripts.field", description=__doc__)
    parser.add_argument(
        "--sizes",
        nargs="+",
        choices=SIZES,
        default=SIZES,
        metavar="SIZE",
        help=f"drafted nodes of a step, at most, or {DEFAULTS} (default: {' '.join(SIZES)})",
    )
    parser.add_argument(
        "--files",
        nargs="+",
        default=(),
        metavar="NAME=FILE",
        help="files of methods that need some: a datastore, an automaton, and heads of the model, such as "
        "eagle3=data/demo/eagle3",
    )
    parser.add_argument(
        "--start",
        choices=("cold",),
        help="cold: methods forget before each question; those that never forget are left out (default: as "
        "each method does)",
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder that gets a folder of answers a size"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Answer the questions at every size; return 1 if a question failed, else 0."""
    args, further = build_parser().parse_known_args(argv)
    if any(word.partition("=")[0] == "--methods" for word in further):
        raise UserError("methods: got some; allowed: the lines of this command; leave it out")
    files, out = files_of(args.files), Path(args.out)
    make_folder(out)
    found = {}
    for size in dict.fromkeys(args.sizes):
        tree = out / f"tree-{size}.json"
        if size != DEFAULTS:
            write_tree(int(size), tree)
        found[size] = methods(size, files, tree, args.start == "cold")
        for words in found[size]:
            entrant_of(words)
    if missing := left_out(files):
        print(f"not compared: {', '.join(missing)}", file=sys.stderr)
    codes = [
        compare.main([*further, "--methods", *found[size], "--out", str(out / size)])
        for size in found
    ]
    return max(codes)


if __name__ == "__main__":
    run_command(main)
