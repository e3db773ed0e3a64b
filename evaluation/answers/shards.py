"""Shards of one run: read, checked to be complete, and merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.answers.answer_file import read_answers
from evaluation.answers.record import CIRCUMSTANCES, RunRecord
from evaluation.answers.row import AnswerRow
from model.commands.command_line import UserError


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard's answers and sidecar, and its place: `index` of `count`, from 1."""

    path: Path
    rows: list[AnswerRow]
    record: RunRecord
    index: int
    count: int


def read_shard(path: Path) -> Shard:
    """Read the answers and the sidecar of a shard.

    Raises:
        UserError: if it is not a shard, or its run is not finished.
    """
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


def check_together(shards: Sequence[Shard]) -> None:
    """Refuse shards that are not the whole of one run.

    Raises:
        UserError: if one is missing or twice there, or of another run.
    """
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


def check_counts(shards: Sequence[Shard]) -> None:
    """Refuse shards of which one has lost rows: questions are dealt out in turn.

    Raises:
        UserError: if their numbers of answers cannot be those of one run.
    """
    counts = [len(shard.rows) for shard in shards]
    if counts != sorted(counts, reverse=True) or counts[0] - counts[-1] > 1:
        found = ", ".join(
            f"{count} in {shard.path}" for count, shard in zip(counts, shards, strict=True)
        )
        raise UserError(
            f"shards: got answers: {found}; allowed: equal numbers, or one more in the first ones; run "
            "the short one again"
        )


def merged_rows(shards: Sequence[Shard]) -> list[AnswerRow]:
    """Return all rows by question id, each with its shard and its place in it.

    Raises:
        UserError: if two shards answer the same question.
    """
    rows: dict[int | str, AnswerRow] = {}
    for shard in shards:
        for index, row in enumerate(shard.rows):
            if row.question_id in rows:
                raise UserError(
                    f"{shard.path}: question {row.question_id!r} is in another shard too"
                )
            before = row.values.get("questions_before", index)
            rows[row.question_id] = row.plus(shard=shard.index, questions_before=before)
    return [rows[key] for key in sorted(rows, key=lambda key: (isinstance(key, str), key))]


def merged_record(shards: Sequence[Shard]) -> RunRecord:
    """Return the record of the merged file: the first shard's, with what all say of themselves."""
    metas = [shard.record.values for shard in shards]
    merged = {
        **metas[0],
        "shard": None,
        "start_time": min(meta["start_time"] for meta in metas),
        "end_time": max(meta["end_time"] for meta in metas),
        "merged_from": [
            {key: meta.get(key) for key in ("shard", "argv", "git_commit", "versions")}
            for meta in metas
        ],
    }
    return RunRecord.of(merged)
