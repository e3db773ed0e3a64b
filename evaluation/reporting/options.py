"""Options that the commands of the leaderboard and of its pictures share: files to read and write."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from evaluation.answers.answer_file import Categories
from evaluation.scoring.comparable import group_answers, load_all
from evaluation.scoring.groups import Group
from model.commands.command_line import UserError


def answer_paths(names: Sequence[str], base: str | None) -> list[Path]:
    """Return the files named, those in the folders named, and the baseline's if it is one; each once, sorted.

    Raises:
        UserError: if a folder holds no answer file.
    """
    found: dict[Path, Path] = {}
    for name in names:
        path = Path(name)
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise UserError(f"no answer files (*.jsonl) in the folder {path}")
        found |= {file.resolve(): file for file in files}
    if base is not None and Path(base).is_file():
        found.setdefault(Path(base).resolve(), Path(base))
    return [found[key] for key in sorted(found)]


def add_answer_options(parser: argparse.ArgumentParser) -> None:
    """Add what `given_groups` reads."""
    parser.add_argument(
        "paths", nargs="+", metavar="FILE_OR_DIR", help="answer files, or folders of *.jsonl"
    )
    parser.add_argument(
        "--base",
        metavar="METHOD_OR_FILE",
        help="the baseline: a method's name, or one of its answer files (default: vanilla)",
    )
    add_category_options(parser)


def given_groups(
    options: argparse.Namespace, paths: Sequence[Path], left_out: list[str]
) -> list[Group]:
    """Return the groups of the files of `answer_paths`; `left_out` says what is not in them, a line each."""
    answers = load_all(paths, options.paths, left_out, given_categories(options))
    return group_answers(answers, options.base, left_out)


def add_category_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--question-file",
        metavar="FILE",
        help="the questions that were answered; answers without a category get the category of "
        "their question",
    )
    parser.add_argument(
        "--category-map",
        nargs="+",
        default=[],
        metavar="OLD=NEW",
        help="rename a category, such as math=math_reasoning for GSM8K in files of EAGLE",
    )


def given_categories(options: argparse.Namespace) -> Categories:
    """Return what `add_category_options` asked for; errors as `Categories.read`."""
    return Categories.read(options.question_file, options.category_map)


def make_folder(path: str | Path) -> None:
    """Make a folder for results and its parents, unless it exists.

    Raises:
        UserError: if it cannot be made.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {path}: {error.strerror}") from None


def check_limit(max_new_tokens: int | None) -> None:
    """Refuse a limit of new tokens below 1 with a `UserError`."""
    if max_new_tokens is not None and max_new_tokens < 1:
        raise UserError(f"--max-new-tokens: got {max_new_tokens}; allowed: 1 or more")
