"""Put the answer files of shards together into the file that one run would have written.

Shards are runs of one command with `--shard 1/4`, `--shard 2/4` and so on, on any machines of the same
kind. Their options must be equal, and all must be given and finished: half a benchmark is not a
smaller benchmark. A matrix that is kept across questions saw its own shard only, which every row and
the sidecar of the result say.

Run:
    python -m evaluation.answers.merge shard-1.jsonl shard-2.jsonl --out answers.jsonl
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.answers.answer_file import check_overwritten, read_answers
from evaluation.answers.record import CIRCUMSTANCES, RunRecord, sidecar_path
from evaluation.answers.row import AnswerRow
from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.files import write_whole

EXAMPLES = """\
examples:
  python -m evaluation.inference_recycling --shard 1/2 --answer-file a-1.jsonl   # on one machine
  python -m evaluation.inference_recycling --shard 2/2 --answer-file a-2.jsonl   # on another
  python -m evaluation.answers.merge a-1.jsonl a-2.jsonl --out a.jsonl
"""


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard's answers and sidecar, and its place: `index` of `count`, from 1."""

    path: Path
    rows: list[AnswerRow]
    record: RunRecord
    index: int
    count: int


def main(argv: Sequence[str] | None = None) -> int:
    """Write the merged file; return 1 if a question in it failed."""
    parser = OptionParser(
        prog="python -m evaluation.answers.merge",
        description="Join the answer files of all shards of a run.",
        epilog=EXAMPLES,
    )
    parser.add_argument("paths", nargs="+", metavar="FILE", help="answer files of all shards")
    parser.add_argument("--out", required=True, metavar="FILE", help="file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    options = parser.parse_args(argv)
    out = Path(options.out)
    if not options.overwrite and (out.exists() or sidecar_path(out).exists()):
        raise UserError(f"out: {out} exists; give --overwrite, or another file")
    shards = sorted((_read_shard(Path(path)) for path in options.paths), key=lambda one: one.index)
    own = {file.resolve() for shard in shards for file in (shard.path, sidecar_path(shard.path))}
    if not own.isdisjoint({out.resolve(), sidecar_path(out).resolve()}):
        raise UserError(f"out: {out} is one of the shards; give another file")
    if out.exists():
        check_overwritten(out)
    _check_together(shards)
    rows = _merged_rows(shards)
    # The sidecar first: rows without one could be taken for another run's.
    _merged_record(shards).write(out)
    write_whole(out, "".join(row.to_json() + "\n" for row in rows))
    num_failed = sum(row.is_failed for row in rows)
    print(f"{len(rows)} answers of {len(shards)} shards in {out}; {num_failed} failed")
    return 1 if num_failed else 0


def _read_shard(path: Path) -> Shard:
    rows, record = read_answers(path), RunRecord.read(path)
    index, slash, count = str(record.shard).partition("/")
    if not slash or not index.isdecimal() or not count.isdecimal():
        raise UserError(
            f"{path}: is not a shard: its sidecar has shard {record.shard!r}; allowed: I/N"
        )
    times = (record.values.get(key) for key in ("start_time", "end_time"))
    if not all(isinstance(time, int | float) for time in times):
        raise UserError(f"{path}: its run is not finished; run its command again")
    return Shard(path, rows, record, int(index), int(count))


def _check_together(shards: Sequence[Shard]) -> None:
    """Refuse shards that are not the whole of one run."""
    first = shards[0]
    expected = list(range(1, first.count + 1))
    found = [shard.index for shard in shards]
    if found != expected or any(shard.count != first.count for shard in shards):
        names = ", ".join(str(shard.record.shard) for shard in shards)
        raise UserError(f"shards: got {names}; allowed: each of {first.count} once")
    for shard in shards[1:]:
        if unlike := shard.record.unlike(first.record, but=CIRCUMSTANCES | {"shard"}):
            key, ours, theirs = unlike
            raise UserError(
                f"{shard.path}: has {key} {ours!r}, {first.path} has {theirs!r}; "
                "only shards of one run can be merged"
            )


def _merged_rows(shards: Sequence[Shard]) -> list[AnswerRow]:
    """Return all rows by question id, each with its shard and its place in it."""
    rows: dict[int | str, AnswerRow] = {}
    for shard in shards:
        for index, row in enumerate(shard.rows):
            if row.question_id in rows:
                raise UserError(
                    f"{shard.path}: question {row.question_id!r} is in another shard too"
                )
            before = row.values.get("questions_before", index)
            rows[row.question_id] = row.plus(shard=shard.index, questions_before=before)
    # Questions are dealt out in turn: a shard with fewer has lost rows.
    counts = [len(shard.rows) for shard in shards]
    if counts != sorted(counts, reverse=True) or counts[0] - counts[-1] > 1:
        found = ", ".join(
            f"{count} in {shard.path}" for count, shard in zip(counts, shards, strict=True)
        )
        raise UserError(
            f"shards: got answers: {found}; allowed: equal numbers, or one more in the first ones; run "
            "the short one again"
        )
    return [rows[key] for key in sorted(rows, key=lambda key: (isinstance(key, str), key))]


def _merged_record(shards: Sequence[Shard]) -> RunRecord:
    """Return the record of the merged file: the first shard's, with what all say of themselves."""
    metas = [shard.record.values for shard in shards]
    merged = {
        **metas[0],
        "shard": None,
        "start_time": min(meta["start_time"] for meta in metas),
        "end_time": max(meta["end_time"] for meta in metas),
        "num_rows": sum(len(shard.rows) for shard in shards),
        "merged_from": [
            {key: meta.get(key) for key in ("shard", "argv", "git_commit", "versions")}
            for meta in metas
        ],
    }
    return RunRecord.of(merged)


if __name__ == "__main__":
    run_command(main)
