"""The answer file of one run: appended row by row, locked, resumed where it stopped.

Every answer is one atomic append. The method's memory is saved under the number of rows it belongs
to BEFORE the row is appended, and the older state is removed after: whenever the process dies, the
rows in the file and the state with their number fit together, so that a resumed run equals an
uninterrupted one.

Files: ANSWERS.jsonl, beside it ANSWERS.meta.json (what was run, with what) and ANSWERS.state/.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from evaluation.answers.answer_file import check_overwritten, read_answers
from evaluation.answers.record import RunRecord, not_resumed, sidecar_path
from evaluation.answers.row import AnswerRow
from evaluation.questions.questions import Question
from model.commands.command_line import UserError, first_line
from model.commands.files import replace_file

# Bytes of a file's name that file systems take; of these, what is put behind an answer file's: ".meta.json",
# process and thread, ".tmp".
LONGEST_NAME, LONGEST_ENDING = 255, 50


class AnswerLog:
    """The answer file of one run; its folders are made.

    `meta` identifies the run, is JSON-able and written to the sidecar; `overwrite` begins anew instead of going on.
    A `UserError` if the file cannot be written, another process writes it, or it is of another run.
    """

    def __init__(self, file: Path, meta: Mapping[str, Any], overwrite: bool = False) -> None:
        # The longest name beside it is the sidecar's until it is whole.
        num_bytes, most = len(os.fsencode(file.name)), LONGEST_NAME - LONGEST_ENDING
        if num_bytes > most:
            raise UserError(
                f"answer file {file}: its name has {num_bytes} bytes; allowed: at most {most}; give a shorter "
                "--model-id, or an --answer-file"
            )
        self.file = file
        self._meta_file = sidecar_path(file)
        self._state_folder = sidecar_path(file, ".state")
        self._overwrite = overwrite
        self._is_new = not file.exists()
        self._descriptor = _open_locked(file)
        try:
            rows: list[AnswerRow] = []
            self._meta = dict(meta)
            self.is_finished = False  # whether the rows are those of a finished run
            if overwrite:
                check_overwritten(file)
            elif os.fstat(self._descriptor).st_size:
                # The sidecar first: a file of another run is left unchanged, even if its last line is torn.
                self._meta = self._agree_with_sidecar(self._meta)
                content = file.read_bytes()
                if not content.endswith(b"\n"):  # a row was only partly written
                    os.ftruncate(self._descriptor, content.rfind(b"\n") + 1)
                rows = read_answers(file) if os.fstat(self._descriptor).st_size else []
            self.num_rows = len(rows)
            self.num_failed = sum(row.is_failed for row in rows)
            self.done = frozenset(row.question_id for row in rows)
        except BaseException:
            self.close()
            raise

    def remaining(self, questions: Sequence[Question]) -> list[Question]:
        """Return the questions that have no row."""
        return [question for question in questions if question.question_id not in self.done]

    def note(self, **values: Any) -> None:
        """Add values to the sidecar; before `begin` or `finish`, which write it."""
        self._meta |= values

    def begin(self) -> None:
        """Write the sidecar; an earlier run is forgotten here, if that was asked for."""
        self.is_finished = False
        # State first: rows without their state are refused, state of other rows would be loaded.
        folder, meta = self._state_folder, glob.escape(self._meta_file.name)
        for left in (
            *folder.glob("rows-*"),
            *folder.glob(".tmp*"),  # safetensors' own
            *self.file.parent.glob(f"{meta}.*.tmp"),
        ):
            if left != self._state_of(self.num_rows):
                left.unlink()
        if self._overwrite:
            os.ftruncate(self._descriptor, 0)
        RunRecord.of(self._meta).write(self.file)

    def append(self, row: AnswerRow, memory: Mapping[str, torch.Tensor]) -> None:
        """Append one answer, with the memory that the method has after it ({} if it keeps none).

        A `UserError` if it cannot be written; the rows before stay, with their memory.
        """
        line = row.to_json(allow_nan=False).encode() + b"\n"
        try:
            if memory:
                self._state_folder.mkdir(exist_ok=True)
                tensors = {name: tensor.contiguous() for name, tensor in memory.items()}
                state = self._state_of(self.num_rows + 1)
                replace_file(state, lambda file: save_file(tensors, file))
            self._write_line(line)
        except (OSError, UserError) as error:
            cause = error.strerror if isinstance(error, OSError) else str(error)
            raise UserError(
                f"answer file {self.file}: a row cannot be written: {cause}; the rows before it are safe: "
                "free some space, and run the same command again"
            ) from error
        self._state_of(self.num_rows).unlink(missing_ok=True)
        self.num_rows += 1
        self.num_failed += row.is_failed

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the memory saved with the last row; a `UserError` if it is missing or cannot be read."""
        file = self._state_of(self.num_rows)
        try:
            return load_file(file)
        except FileNotFoundError:
            cause = "does not exist"
        except (OSError, SafetensorError) as error:
            cause = f"cannot be read: {first_line(error)}"
        raise UserError(
            f"cannot resume {self.file}: the method's memory {file} {cause}; give --overwrite, or "
            "another --answer-file"
        )

    def finish(self) -> None:
        """Write end time and number of rows, unless those found are a finished run's, and close the file."""
        if not self.is_finished:
            self._meta |= {"end_time": time.time(), "num_rows": self.num_rows}
            RunRecord.of(self._meta).write(self.file)
        self.close()

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._descriptor >= 0:
            has_begun = os.fstat(self._descriptor).st_size or self._meta_file.exists()
            if self._is_new and not has_begun:
                # Reports over the folder would refuse an empty file.
                self.file.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def _state_of(self, num_rows: int) -> Path:
        return self._state_folder / f"rows-{num_rows}.safetensors"

    def _write_line(self, line: bytes) -> None:
        size = os.fstat(self._descriptor).st_size
        try:
            if os.write(self._descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, "only a part of it fitted, which was removed again")
            os.fsync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, size)
            raise

    def _agree_with_sidecar(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Return the sidecar of the rows in the file, checked against this run's."""
        how = "give --overwrite, or another --answer-file"
        record = RunRecord.read(self.file)
        if not record:
            raise UserError(
                f"answer file {self.file} is not empty, but has no sidecar {self._meta_file.name} that says "
                f"which run it belongs to; {how}"
            )
        mine = json.loads(json.dumps(meta))  # as it reads back: tuples become lists
        if unlike := record.unlike(RunRecord.of(mine), but=not_resumed()):
            key, theirs, ours = unlike
            raise UserError(
                f"answer file {self.file} belongs to a run with {key} {theirs!r}, this run has {ours!r}; {how}"
            )
        found = record.values
        self.is_finished = found.get("end_time") is not None
        part = {key: mine.get(key) for key in ("start_time", "git_commit", "versions")}
        resumed = [*found.get("resumed", []), part]
        is_open = {"end_time": None, "num_rows": None}
        # The range of questions that holds those of both runs; None is no limit.
        ranges = {}
        for key, outer in (("question_begin", min), ("question_end", max)):
            if key in mine:
                limits = (found.get(key), mine[key])
                ranges[key] = None if None in limits else outer(limits)
        return {**found, **ranges, **is_open, "resumed": resumed}


def _open_locked(file: Path) -> int:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"answer file {file}: cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise UserError(
            f"answer file {file}: another process is writing it; wait for it, or give another --answer-file"
        ) from error
    if not file.exists() or not os.path.samestat(os.fstat(descriptor), file.stat()):
        os.close(descriptor)
        raise UserError(f"answer file {file}: was removed meanwhile; run the command again")
    return descriptor
