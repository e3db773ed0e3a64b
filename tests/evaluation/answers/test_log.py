"""The answer file: whole rows, with the state that belongs to them, wherever a process dies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from evaluation.answers.log import AnswerLog
from evaluation.answers.row import AnswerRow
from evaluation.questions.questions import Question
from model.commands.command_line import UserError
from tests.evaluation.conftest import read_meta, read_rows

META = {"method": "some", "options": {"window": (1, 2)}, "start_time": 1.0}
# More than any of the operations below takes; the loops end at the first one that does not crash.
MOST_STEPS = 40


class Crash(BaseException):
    """The end of a process; a `BaseException`, so that nothing tidies up."""


def make_row(number: int) -> AnswerRow:
    choice = {"turns": ["text ü \u2028"], "new_tokens": [1], "accept_lengths": [1]}
    return AnswerRow.of({"question_id": number, "category": "qa", "choices": [choice]})


def memory_after(number: int) -> dict[str, torch.Tensor]:
    return {"matrix": torch.full((3, 2), number, dtype=torch.int32)}


def begun(file: Path, overwrite: bool = False, meta: dict[str, Any] = META) -> AnswerLog:
    log = AnswerLog(file, meta, overwrite)
    log.begin()
    return log


def append_up_to(log: AnswerLog, last: int) -> None:
    for number in range(log.num_rows + 1, last + 1):
        log.append(make_row(number), memory_after(number))


def check_rows_and_state(log: AnswerLog, file: Path) -> None:
    """What the file holds is a run that stopped after a whole row, with that row's state."""
    numbers = [row["question_id"] for row in read_rows(file)]
    assert numbers == list(range(1, log.num_rows + 1)), "a row is lost, doubled or torn"
    if numbers:
        assert int(log.memory()["matrix"][0, 0]) == numbers[-1], "the state is of another row"


class CrashingDisk:
    """Counts the steps of what is written, and dies before, in the middle of or after one."""

    def __init__(self, patch: pytest.MonkeyPatch, crash_at: int, when: str) -> None:
        self.num_steps = 0
        self._crash_at, self._when = crash_at, when
        for name in ("write", "fsync", "ftruncate", "replace"):
            patch.setattr(os, name, self._step(getattr(os, name)))
        for name in ("unlink", "mkdir", "write_bytes"):
            patch.setattr(Path, name, self._step(getattr(Path, name)))
        save = safetensors.torch.save_file
        patch.setattr(safetensors.torch, "save_file", self._step(save))

    def _step(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*given: Any, **named: Any) -> Any:
            self.num_steps += 1
            if self.num_steps != self._crash_at:
                return call(*given, **named)
            if self._when == "midway" and call.__name__ == "write":
                call(given[0], given[1][: len(given[1]) // 2])
            elif self._when == "midway" and call.__name__ == "save_file":
                given[1].write_bytes(b"half a tensor")
                (given[1].parent / ".tmpXyz").write_bytes(b"as safetensors leaves it")
            elif self._when != "before":
                call(*given, **named)
            raise Crash

        return step


def crashes(
    prepare: Callable[[], AnswerLog], work: Callable[[AnswerLog], None], when: str
) -> Iterator[int]:
    """Do the work again and again, each time dying one step later, until it survives; yield the
    step of every death.
    """
    for step in range(1, MOST_STEPS):
        log = prepare()
        has_died = False
        with pytest.MonkeyPatch.context() as patch:
            CrashingDisk(patch, step, when)
            try:
                work(log)
            except Crash:
                has_died = True
        log.close()  # as the end of the process does: the lock goes
        if not has_died:
            assert step > 4, "too few steps seen: has the way of writing changed?"
            return
        yield step
    pytest.fail(f"the work has more than {MOST_STEPS} steps")


@pytest.mark.parametrize("when", ["before", "midway", "after"])
def test_a_crash_at_any_step_of_an_append_leaves_rows_and_state_that_fit(
    when: str, tmp_path: Path
) -> None:
    folders = (tmp_path / str(number) for number in range(MOST_STEPS))
    file = tmp_path

    def two_rows() -> AnswerLog:
        nonlocal file
        file = next(folders) / "run.jsonl"
        log = begun(file)
        append_up_to(log, 2)
        return log

    rows_left = set()
    for _ in crashes(two_rows, lambda log: append_up_to(log, 3), when):
        again = begun(file)
        check_rows_and_state(again, file)
        assert again.done == set(range(1, again.num_rows + 1))
        rows_left.add(again.num_rows)
        append_up_to(again, 5)
        check_rows_and_state(again, file)
        again.finish()
        assert [state.name for state in file.with_suffix(".state").iterdir()] == [
            "rows-5.safetensors"
        ], "old state is left behind"
    assert rows_left == {2, 3}, "crashes on both sides of the row were expected"


@pytest.mark.parametrize("when", ["before", "midway", "after"])
def test_a_crash_while_beginning_anew_leaves_the_old_run_or_none(when: str, tmp_path: Path) -> None:
    folders = (tmp_path / str(number) for number in range(MOST_STEPS))
    file = tmp_path

    def to_overwrite() -> AnswerLog:
        nonlocal file
        file = next(folders) / "run.jsonl"
        old = begun(file)
        append_up_to(old, 2)
        old.finish()
        # What a process that died between row and clean-up leaves.
        (file.with_suffix(".state") / "rows-1.safetensors").write_bytes(b"old")
        return AnswerLog(file, {**META, "method": "other"}, overwrite=True)

    for _ in crashes(to_overwrite, lambda log: log.begin(), when):
        again = AnswerLog(file, META)
        assert again.num_rows in (0, 2)
        try:
            check_rows_and_state(again, file)
        except UserError as error:
            assert "--overwrite" in str(error), "rows without their state should be refused"
        again.close()


def test_an_overwritten_run_stays_until_the_new_one_begins(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    old = begun(file)
    append_up_to(old, 2)
    old.finish()
    before = file.read_bytes(), file.with_suffix(".meta.json").read_bytes()
    new = AnswerLog(file, {**META, "method": "other"}, overwrite=True)
    assert new.num_rows == 0
    assert not new.done
    assert (file.read_bytes(), file.with_suffix(".meta.json").read_bytes()) == before
    assert (file.with_suffix(".state") / "rows-2.safetensors").is_file()
    new.begin()
    assert file.read_bytes() == b""
    assert read_meta(file)["method"] == "other"
    assert not list(file.with_suffix(".state").iterdir())
    append_up_to(new, 1)
    check_rows_and_state(new, file)
    new.finish()


@pytest.mark.parametrize("tail", [b'{"question_id": 3', b"{", b'{"a": "\xc3'])
def test_a_torn_last_line_is_dropped(tail: bytes, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    log = begun(file)
    append_up_to(log, 2)
    log.close()
    whole = file.read_bytes()
    file.write_bytes(whole + tail)
    again = AnswerLog(file, META)
    assert file.read_bytes() == whole
    assert again.num_rows == 2
    again.close()


def test_a_torn_first_line_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    begun(file).close()
    file.write_bytes(b'{"question')
    again = begun(file)
    assert again.num_rows == 0
    append_up_to(again, 1)
    assert [row["question_id"] for row in read_rows(file)] == [1]
    again.close()


def test_a_row_that_the_disk_takes_in_part_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.jsonl"
    log = begun(file)
    append_up_to(log, 1)
    whole = file.read_bytes()
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda number, line: write(number, line[:9]))
        with pytest.raises(UserError, match=r"only a part of it fitted, .*; the rows before"):
            append_up_to(log, 2)
    assert file.read_bytes() == whole
    log.close()


def test_one_process_writes_an_answer_file_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    first = begun(file)
    for overwrite in (False, True):
        with pytest.raises(UserError, match="another process"):
            AnswerLog(file, META, overwrite)
    first.close()
    first.close()
    AnswerLog(file, META).close()


def test_a_refused_log_lets_go_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    log = begun(file)
    append_up_to(log, 1)
    log.close()
    with pytest.raises(UserError, match="method 'some', this run has 'other'"):
        AnswerLog(file, {**META, "method": "other"})
    AnswerLog(file, META).close()


def test_times_versions_and_commit_may_differ_between_the_parts_of_a_run(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    log = begun(file, meta={**META, "git_commit": "a", "versions": {"torch": "1"}})
    append_up_to(log, 1)
    log.close()
    later = {**META, "start_time": 2.0, "git_commit": "b", "versions": {"torch": "2"}}
    begun(file, meta=later).finish()
    meta = read_meta(file)
    assert (meta["git_commit"], meta["start_time"]) == ("a", 1.0)
    assert meta["end_time"] > 2 and meta["num_rows"] == 1
    begun(file, meta=later).close()
    assert read_meta(file)["num_rows"] is None, "a run that goes on may have more rows soon"
    assert meta["resumed"] == [
        {"start_time": 2.0, "git_commit": "b", "versions": {"torch": "2"}}
    ], "the sidecar should tell of the part that another commit wrote"


def test_names_that_differ_after_a_dot_do_not_share_a_sidecar(tmp_path: Path) -> None:
    for name in ("run-0.0", "run-0.7"):
        log = begun(tmp_path / name, meta={**META, "name": name})
        append_up_to(log, 1)
        log.finish()
    assert len(list(tmp_path.glob("*.meta.json"))) == 2
    assert len(list(tmp_path.glob("*.state"))) == 2


def test_a_number_that_is_not_json_is_never_written(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    log = begun(file)
    with pytest.raises(ValueError, match="JSON"):
        log.append(make_row(1).plus(wall_time=float("nan")), {})
    assert file.read_bytes() == b""
    log.close()


@pytest.mark.parametrize("names", [("a", "a.jsonl"), ("a.jsonl", "a")])
def test_a_file_whose_sidecar_and_matrix_would_be_anothers_is_refused(
    names: tuple[str, str], tmp_path: Path
) -> None:
    first, second = (tmp_path / name for name in names)
    log = begun(first)
    append_up_to(log, 2)
    log.finish()
    with pytest.raises(UserError, match=f"{second}: {first} exists, and both would use a.meta"):
        begun(second, overwrite=True)
    assert not second.exists()
    again = AnswerLog(first, META)
    check_rows_and_state(again, first)
    again.close()


@pytest.mark.parametrize("num_letters", [210, 246, 249, 300])
def test_a_name_without_room_for_the_sidecar_s_is_refused_and_leaves_nothing(
    num_letters: int, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"its name has \d+ bytes; .*--model-id"):
        AnswerLog(tmp_path / f"{'a' * num_letters}.jsonl", META)
    assert not list(tmp_path.iterdir())


def test_the_longest_name_is_written(tmp_path: Path) -> None:
    log = begun(tmp_path / f"{'a' * 199}.jsonl")
    log.finish()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("content", [b"my diary\n", b"\xff\x00", b'{"question_id": 1}\n', b"[1"])
@pytest.mark.parametrize("is_link", [False, True])
def test_only_answer_files_are_overwritten(content: bytes, is_link: bool, tmp_path: Path) -> None:
    theirs = file = tmp_path / "theirs.txt"
    theirs.write_bytes(content)
    if is_link:
        file = tmp_path / "link.jsonl"
        file.symlink_to(theirs)
    with pytest.raises(
        UserError, match=r"overwrite: .* is not an answer file; .* give another file"
    ):
        AnswerLog(file, META, overwrite=True)
    assert theirs.read_bytes() == content


def test_answers_are_overwritten_whatever_is_left_of_them(tmp_path: Path) -> None:
    foreign, torn = tmp_path / "foreign.jsonl", tmp_path / "torn.jsonl"
    foreign.write_text(
        AnswerRow.of_question(Question(1, "qa", ("a",)), "x", [], "failed").to_json() + "\n{"
    )
    begun(torn).close()
    torn.write_text('{"question_id": 1, "cat')  # the sidecar is there
    (tmp_path / "empty.jsonl").touch()
    for name in ("foreign", "torn", "empty"):
        begun(tmp_path / f"{name}.jsonl", overwrite=True).close()
        assert not (tmp_path / f"{name}.jsonl").read_bytes()
