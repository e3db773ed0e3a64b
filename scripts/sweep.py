"""Run a whole experiment from one file: models x benchmarks x dtypes x methods, several times.

The file is YAML; see EXAMPLE below. Runs are interleaved: every method answers once before any
answers again, in an order that rotates, so that a machine that drifts is fair to all. A sweep that
is cut goes on where it stopped when the same command is given again; a cell that fails is said and
left out, and the others go on. It ends in the leaderboard over all that is finished.

python -m scripts.sweep experiment.yaml --dry-run
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from evaluation.answering import command as cli
from evaluation.answering.config import OPTION_NAMES
from evaluation.answers.record import RunRecord
from evaluation.reporting.options import make_folder
from evaluation.reporting.tables import markdown_table
from evaluation.scoring.comparable import DEFAULT_BASELINE
from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.files import read_text
from model.commands.interrupt import FINISHING, Interrupt
from model.methods.registry import METHODS, find_method
from model.options import unknown_name

EXAMPLE = """example of a file:
  out: results/first            # answers, and the report in report/
  models: [data/demo/model]     # folders or hub names
  benches: [demo]               # default: demo
  dtypes: [float32]             # default: auto
  runs: 3                       # default: 1
  options: {max_new_tokens: 64} # of every run, by the names of the inference commands
  methods:
    - vanilla
    - recycling
    - recycling: {output_id_topk: 12, start: cold}
"""
MAX_BYTES = 2**20
MAX_CELLS = 10_000
KEYS = ("out", "models", "benches", "dtypes", "runs", "options", "methods")
# Options that the sweep itself gives to the inference commands.
OWN_OPTIONS = ("model_path", "model_id", "bench_name", "dtype", "answer_file", "overwrite")


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of one inference command.

    Attributes:
        run: which repetition, from 1.
        name: what it is, without the repetition.
        method: its method.
        file: where its answers go.
        options: words of its command line.
    """

    run: int
    name: str
    method: str
    file: Path
    options: tuple[str, ...]

    @property
    def seconds(self) -> float | None:
        """Seconds that it took; None if it is not finished."""
        record = RunRecord.read(self.file)
        start, end = record.start_time, record.end_time
        if start is None or end is None:
            return None
        return max(0.0, end - start) if self.file.is_file() else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sweep; return 1 if a cell failed or has failed questions.

    Raises:
        UserError: the file is not what it should be.
    """
    options = _parse(argv)
    text = read_text(Path(options.file), "sweep", MAX_BYTES)
    cells = read_sweep(text, f"sweep {options.file}")
    _print_plan(cells)
    if options.dry_run:
        return 0
    # Those that are finished, too: their command sees whether they are what the file says, and ends at once.
    codes = {cell: _run(cell, cells) for cell in cells}
    for cell, code in codes.items():
        if code:
            what = "has failed questions" if code == 1 else f"failed with exit code {code}"
            print(f"run {cell.run}, {cell.name}: {what}", file=sys.stderr)
    sound = [cell for cell in cells if cell.seconds is not None and codes[cell] <= 1]
    code = _leaderboard(sound, cells[0].file)
    return 1 if code or any(codes.values()) else 0


def read_sweep(text: str, where: str) -> list[Cell]:
    """Return the cells of a sweep file in the order in which they run.

    Raises:
        UserError: naming the first mistake.
    """
    try:
        content = yaml.safe_load(text)
    # PyYAML lets many types through where a tag does not fit its value.
    except Exception as error:
        raise UserError(f"{where}: is not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(content, dict) or not set(content) <= set(KEYS):
        raise UserError(f"{where}: expected a mapping with the keys {', '.join(KEYS)}")
    models = _texts(content, "models", None, where)
    benches = _texts(content, "benches", ["demo"], where)
    dtypes = _texts(content, "dtypes", ["auto"], where)
    methods = _methods(content.get("methods"), where)
    common = _options(content.get("options", {}), f"{where}: options")
    out = Path(_texts({"out": [content.get("out")]}, "out", None, where)[0]).expanduser()
    runs = content.get("runs", 1)
    num_cells = len(methods) * len(models) * len(benches) * len(dtypes)
    if type(runs) is not int or not 1 <= runs * num_cells <= MAX_CELLS:
        raise UserError(
            f"{where}: runs: allowed: a whole number from 1, {MAX_CELLS} cells at most in all"
        )
    known = OPTION_NAMES - set(OWN_OPTIONS)
    for name in common:
        if name not in known:
            raise UserError(f"{where}: options: {unknown_name('option', name, sorted(known))}")
    cells = []
    for run in range(1, runs + 1):
        for model in models:
            for bench in benches:
                for dtype in dtypes:
                    turn = (run - 1) % len(methods)
                    for method, own in methods[turn:] + methods[:turn]:
                        given = common | own
                        given |= {"model_path": model, "bench_name": bench, "dtype": dtype}
                        cells.append(_cell(run, method, own, given, out))
    _check(cells, where)
    if DEFAULT_BASELINE not in {method for method, _ in methods}:
        raise UserError(
            f"{where}: methods: {DEFAULT_BASELINE}, the leaderboard's baseline, must be among them"
        )
    return cells


def _cell(run: int, method: str, own: dict[str, Any], given: dict[str, Any], out: Path) -> Cell:
    parts = [Path(given["model_path"]).name, given["bench_name"], given["dtype"], method]
    parts += [f"{name}-{Path(str(value)).name}" for name, value in own.items()]
    name = "-".join(re.sub(r"[^\w.+-]", "_", part) for part in parts)
    file = out / f"run-{run}" / f"{name}.jsonl"
    words = [_word(option, value) for option, value in given.items()]
    return Cell(run, name, method, file, (*words, f"--answer-file={file}"))


def _word(name: str, value: Any) -> str:
    """Spell an option as one word, so that a value that begins with a dash is a value."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={value}"


def _check(cells: Sequence[Cell], where: str) -> None:
    """Refuse cells that overwrite each other, and what can be known to be wrong with one."""
    seen: set[Path] = set()
    for cell in cells:
        if cell.file in seen:
            raise UserError(f"{where}: {cell.name} is there twice")
        seen.add(cell.file)
        if cell.run == 1:
            try:
                cli.parse(find_method(cell.method), cell.options)
            except UserError as error:
                raise UserError(f"{where}: {cell.name}: {error}") from None


def _texts(
    content: Mapping[str, Any], key: str, default: list[str] | None, where: str
) -> list[str]:
    values = content.get(key, default)
    if not isinstance(values, list) or not values or not all(map(_is_text, values)):
        raise UserError(f"{where}: {key}: allowed: one or more names")
    return values


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and value.isprintable()


def _methods(values: Any, where: str) -> list[tuple[str, dict[str, Any]]]:
    """Return each method with its own options."""
    if not isinstance(values, list) or not values:
        raise UserError(f"{where}: methods: allowed: a list of NAME or NAME: {{OPTION: VALUE}}")
    found = []
    for value in values:
        pairs = list(value.items()) if isinstance(value, dict) else [(value, {})]
        if len(pairs) != 1 or not _is_text(pairs[0][0]):
            raise UserError(f"{where}: methods: allowed: NAME, or NAME: {{OPTION: VALUE}}")
        method, options = pairs[0]
        if method not in METHODS or find_spec(f"evaluation.inference_{method}") is None:
            raise UserError(f"{where}: {unknown_name('method', method, list(METHODS))}")
        found.append((method, _options(options, f"{where}: {method}")))
    return found


def _options(values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise UserError(f"{where}: allowed: a mapping of option names to values")
    for name, value in values.items():
        is_name = isinstance(name, str) and re.fullmatch(r"[a-z][a-z0-9_]*", name)
        if not is_name or not (isinstance(value, int | float) or _is_text(value)):
            raise UserError(
                f"{where}: allowed: names such as max_new_tokens, with a number, true, false or a text"
            )
        if name in OWN_OPTIONS:
            raise UserError(f"{where}: {name} is the sweep's own; leave it out")
    return values


def _run(cell: Cell, cells: Sequence[Cell]) -> int:
    """Run a cell's command; return its exit code."""
    left = [other for other in cells if other.seconds is None]
    print(f"== run {cell.run}, {cell.name} ({_estimate(cells, left)})", file=sys.stderr)
    make_folder(cell.file.parent)
    command = [sys.executable, "-m", f"evaluation.inference_{cell.method}", *cell.options]
    with Interrupt(FINISHING) as interrupt:
        code = subprocess.run(command).returncode
        if interrupt.is_noted:
            raise KeyboardInterrupt
    return code


def _estimate(cells: Sequence[Cell], left: Sequence[Cell]) -> str:
    """Say how long the rest takes, by cells of the same name where there are, else by all."""
    known: dict[str, list[float]] = {}
    for cell in cells:
        if (seconds := cell.seconds) is not None:
            known.setdefault(cell.name, []).append(seconds)
    every = [seconds for values in known.values() for seconds in values]
    if not every:
        return f"{len(left)} left; how long is known after the first"
    total = sum(fmean(known.get(cell.name, every)) for cell in left)
    return f"{len(left)} left, about {total / 60:.1f} minutes"


def _print_plan(cells: Sequence[Cell]) -> None:
    left = [cell for cell in cells if cell.seconds is None]
    rows = [[str(cell.run), cell.name, "to do" if cell in left else "finished"] for cell in cells]
    print(markdown_table(["Run", "Cell", "State"], rows, num_text_columns=3))
    print(f"\n{len(cells)} cells: {_estimate(cells, left)}")


def _leaderboard(finished: Sequence[Cell], first: Path) -> int:
    """Make the report over what is finished; return its exit code."""
    if not finished:
        print("no cell is finished; there is nothing to report", file=sys.stderr)
        return 1
    report = first.parent.parent / "report"
    command = [sys.executable, "-m", "evaluation.leaderboard", "--out", str(report)]
    return subprocess.run([*command, "--", *(str(cell.file) for cell in finished)]).returncode


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(
        prog="python -m scripts.sweep",
        description="Run methods on models and benchmarks, interleaved, and make the leaderboard.",
        epilog=EXAMPLE,
    )
    parser.add_argument("file", metavar="FILE", help="what to run, in YAML")
    parser.add_argument("--dry-run", action="store_true", help="show the plan and stop")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_command(main)
