"""Score methods on traces: their acceptance lengths as on the model, and by a cost curve their times.

A trace holds a model's answers and what it says after the guesses of the methods that were named when it was
recorded (`evaluation.record`). Lengths of these methods, and of all that learn from accepted tokens only, are those
of a run on the model without warm-up. Another method may draft texts that were not recorded, and is shown the rows
of similar texts; the last column says in what share of its steps.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evaluation.answers.log import AnswerLog
from evaluation.answers.record import git_commit
from evaluation.replay.costs import StepCosts
from evaluation.replay.replaying import Counts, Replay, replayable
from evaluation.replay.trace import SUFFIX, Source, questions_of
from evaluation.reporting.tables import figure_text, markdown_table
from evaluation.reporting.titles import BENCH_TITLES
from model.commands.command_line import OptionParser, UserError, run_command
from model.machine.packages import versions
from model.machine.timing import progress

BASELINE = "vanilla"
EXAMPLES = """\
examples:
  python -m evaluation.replay data/bank/demo
  python -m evaluation.replay data/bank/demo --methods recycling "pld --num-pred-tokens 4" suffix
  python -m evaluation.replay data/bank/demo --methods mymodule:MyDrafter
  python -m evaluation.replay data/bank/demo --methods recycling hybrid \\
      --costs data/bank/costs/h200-7b-float16.json --out replayed
  python -m evaluation.leaderboard replayed
"""
Key = tuple[str, str]  # a trace's name and a benchmark


def replay(
    folders: Sequence[Path], methods: Sequence[str], costs: StepCosts | None, out: Path | None
) -> dict[str, dict[Key, Counts]]:
    """Return the counts of each method on every set of the traces; write answer files if `out` is given.

    A `UserError` if a trace or a method cannot be used.
    """
    found: dict[str, dict[Key, Counts]] = {words: {} for words in methods}
    participants = [replayable(words) for words in methods]
    sources = {folder: Source.read(folder) for folder in folders}
    is_one = len({bench for source in sources.values() for bench in source.sets}) == 1
    for folder, source in sources.items():
        for bench, questions in source.sets.items():
            to = out if is_one or out is None else out / bench
            runs = [Replay(source, participant, costs) for participant in participants]
            with ExitStack() as logs:
                written = [_log(run, source, bench, costs, to) for run in runs] if to else []
                for log in written:
                    logs.callback(log.close)
                    log.begin()
                total, file = questions["num_asked"], folder / f"{bench}{SUFFIX}"
                for question in progress(questions_of(file), total=total, unit="question"):
                    rows = [run.answer(question) for run in runs]
                    for log, row in zip(written, rows, strict=False):
                        log.append(row, {})
                for log in written:
                    log.finish()
            for run in runs:
                found[run.participant.words][source.name, bench] = run.counts
    return found


def _log(
    run: Replay, source: Source, bench: str, costs: StepCosts | None, folder: Path
) -> AnswerLog:
    """Return the new answer file of a method on a set, with its sidecar."""
    assert costs is not None, "times need costs"
    label = run.participant.label
    file = folder / f"{source.name}-{label}-replayed.jsonl"
    about = {key: costs.about.get(key) for key in ("device", "machine", "threads")}
    sidecar: dict[str, Any] = {
        "method": run.participant.method.name,
        "options": asdict(run.participant.config),
        "model_id": f"{source.name}-{label}",
        "bench_name": bench,
        "model_path": source.model_path,
        "model_fingerprint": source.model_fingerprint,
        "question_file_sha256": source.sets[bench]["sha256"],
        "num_questions": source.sets[bench]["num_questions"],
        "dtype": source.dtype,
        **about,
        "max_new_tokens": source.max_new_tokens,
        "temperature": 0.0,
        "conv_template": source.conv_template,
        "replayed": costs.name,
        "keeps_memory": run.keeps_memory,
        "load_matrix": None,
        "state_order": None,
        "versions": versions(),
        "git_commit": git_commit(),
        "argv": sys.argv[1:],
        "start_time": time.time(),
        "end_time": None,
    }
    return AnswerLog(file, sidecar, overwrite=True)


def table(found: dict[str, dict[Key, Counts]], has_costs: bool) -> str:
    """Return methods by traces and sets: MAT and, by the costs, the speed-up over the first method's time."""
    keys = list(next(iter(found.values())))
    titles = [f"{name}: {BENCH_TITLES.get(bench, bench)}" for name, bench in keys]
    base = found.get(BASELINE, {})
    rows = []
    for words, by_set in found.items():
        cells = []
        for key in keys:
            cell = figure_text(by_set[key].mat)
            if has_costs and key in base:
                cell += f", {base[key].seconds / by_set[key].seconds:.2f}x"
            cells.append(cell)
        steps = sum(counts.steps for counts in by_set.values())
        nodes = sum(counts.nodes for counts in by_set.values()) / steps
        unrecorded = sum(counts.unrecorded_steps for counts in by_set.values()) / steps
        rows.append([words, *cells, figure_text(nodes), f"{100 * unrecorded:.1f}%"])
    return markdown_table(["Method", *titles, "Nodes a step", "Steps not recorded"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = OptionParser(
        prog="python -m evaluation.replay",
        description="Score methods on recorded traces, without the model.",
        epilog=EXAMPLES,
    )
    parser.add_argument("traces", nargs="+", metavar="DIR", help="folders of evaluation.record")
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help='methods with options: "pld --num-pred-tokens 4", package.module:DrafterClass '
        "(default: those that the traces were recorded for)",
    )
    parser.add_argument(
        "--costs",
        metavar="FILE",
        help="cost curve of a machine (evaluation.record --costs): predicts times, serves automatic budgets",
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="write answer files, in a folder for each of several benchmarks; needs --costs",
    )
    args = parser.parse_args(argv)
    if args.out and not args.costs:
        raise UserError(
            "out: got it without --costs, without which answers have no times; give both"
        )
    folders = [Path(folder) for folder in args.traces]
    named = args.methods or [one for folder in folders for one in Source.read(folder).methods]
    methods = list(dict.fromkeys([*([BASELINE] if args.costs else []), *named]))
    costs = StepCosts.read(Path(args.costs)) if args.costs else None
    out = Path(args.out) if args.out else None
    found = replay(folders, methods, costs, out)
    what = "MAT, replayed"
    if costs is not None:
        spread = f"{100 * costs.spread:.0f}% (interquartile range)"
        what += f"; speed-up by the costs of {costs.name}, whose passes varied by {spread}"
    print(f"{what}\n\n{table(found, costs is not None)}")
    return 0


if __name__ == "__main__":
    run_command(main)
