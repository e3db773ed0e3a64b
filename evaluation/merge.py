"""Put the answer files of shards together into the file that one run would have written.

Shards are runs of one command with `--shard 1/4`, `--shard 2/4` and so on, on any machines of the same
kind. Their options must be equal, and all must be given and finished: half a benchmark is not a
smaller benchmark. A matrix that is kept across questions saw its own shard only, which every row and
the sidecar of the result say.

Run:
    python -m evaluation.merge shard-1.jsonl shard-2.jsonl --out answers.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from evaluation.answers.answer_file import check_overwritten
from evaluation.answers.record import sidecar_path
from evaluation.answers.shards import (
    check_counts,
    check_together,
    merged_record,
    merged_rows,
    read_shard,
)
from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.files import write_whole

EXAMPLES = """\
examples:
  python -m evaluation.inference_recycling --shard 1/2 --answer-file a-1.jsonl   # on one machine
  python -m evaluation.inference_recycling --shard 2/2 --answer-file a-2.jsonl   # on another
  python -m evaluation.merge a-1.jsonl a-2.jsonl --out a.jsonl
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the merged file; return 1 if a question in it failed."""
    options = _parse(argv)
    out = Path(options.out)
    if not options.overwrite and (out.exists() or sidecar_path(out).exists()):
        raise UserError(f"out: {out} exists; give --overwrite, or another file")
    shards = sorted((read_shard(Path(path)) for path in options.paths), key=lambda one: one.index)
    own = {file.resolve() for shard in shards for file in (shard.path, sidecar_path(shard.path))}
    if not own.isdisjoint({out.resolve(), sidecar_path(out).resolve()}):
        raise UserError(f"out: {out} is one of the shards; give another file")
    if out.exists():
        check_overwritten(out)
    check_together(shards)
    rows = merged_rows(shards)
    check_counts(shards)
    # The sidecar first: rows without one could be taken for another run's.
    merged_record(shards).write(out)
    write_whole(out, "".join(row.to_json() + "\n" for row in rows))
    num_failed = sum(row.is_failed for row in rows)
    print(f"{len(rows)} answers of {len(shards)} shards in {out}; {num_failed} failed")
    return 1 if num_failed else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(
        prog="python -m evaluation.merge",
        description="Join the answer files of all shards of a run.",
        epilog=EXAMPLES,
    )
    parser.add_argument("paths", nargs="+", metavar="FILE", help="answer files of all shards")
    parser.add_argument("--out", required=True, metavar="FILE", help="file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_command(main)
