"""Every defect of a hand-made file is flagged on its line, and sound rows are not.

Run: pytest tests/evaluation/test_defects.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from evaluation.answers.answer_file import read_lines
from evaluation.answers.defects import Effect, find_defects
from evaluation.defects import main
from evaluation.scoring.per_question import question_frame
from model.commands.command_line import UserError
from tests.evaluation.answers.answer_rows import (
    Row,
    failed_row,
    make_row,
    random_rows,
    write_answers,
)

LISTED, UNSOUND, BROKEN, UNUSABLE = Effect
META = {"max_new_tokens": 8}
Capture = pytest.CaptureFixture[str]


def _row(question_id: int, **keys: Any) -> Row:
    """A sound row of two turns, with what is given changed."""
    row = make_row(question_id, "qa", [3, 2, 1], 0.5, ["one", "two"])
    row["choices"][0] |= {
        "new_tokens": [4, 2],
        "wall_time": [0.51234567 + question_id, 0.27654321 + question_id],
        "decoding_steps": [2, 1],
    }
    row["choices"][0] |= keys
    return row


def _of_steps(question_id: int, steps: list[int]) -> Row:
    """A row whose writer gave the numbers of steps, not their lengths."""
    row = _row(question_id, decoding_steps=steps)
    del row["choices"][0]["accept_lengths"]
    return row


STALE = {"new_tokens": [3, 3], "wall_time": [1.23456789, 1.23456789]}

# Each with what is said of it, in part, and the effect; None: nothing is wrong.
CASES: list[tuple[Row, str | None, Effect | None]] = [
    (_row(1), None, None),
    (_row(2, turns=["one", "ERROR"]), "turn 1 is 'ERROR': it raised an error", UNSOUND),
    (_row(3, turns=["one", "ERROR"], token_ids=[[1, 2, 3, 4], [5, 6]]), None, None),
    (_row(4, **STALE), "turn 1 repeats the counters of the turn before: 3 tokens in 1.2", UNSOUND),
    (_row(5, new_tokens=[3, 3], wall_time=[0.5, 0.5]), None, None),
    (
        _row(6, new_tokens=[11, 2], accept_lengths=[6, 5, 2]),
        "turn 0 has 11 new tokens, 3 past the limit of 8; exact figures count 8",
        LISTED,
    ),
    (_row(7, wall_time=[0.0, 0.0]), "took 0.0 s, a wall_time is above 0", UNUSABLE),
    (_row(8, wall_time=[-1.0, 0.5]), "took -0.5 s", UNUSABLE),
    (_row(9, wall_time=[-0.25, 1.0]), "turn 0 took -0.25 s", UNUSABLE),
    (_row(10, new_tokens=[7, -1]), "turn 1 has -1 new tokens", UNSOUND),
    (_row(11, new_tokens=[6, 0]), "turn 1 has no new token", LISTED),
    (_row(12, wall_time=[0.5123]), "1 wall_time for 2 turns", UNSOUND),
    (_row(13, accept_lengths=[3, 0, 3]), "a step of 0 tokens", UNSOUND),
    (_row(14, accept_lengths=[3, 1, 1]), "accept_lengths sum to 5, new_tokens to 6", LISTED),
    (_row(15, accept_lengths=[9, 9, 9]), "accept_lengths sum to 27, new_tokens to 6", UNSOUND),
    (_row(16, decoding_steps=[2, 2]), "accept_lengths are 3, decoding_steps to 4", LISTED),
    (_row(17, decoding_steps=[5, 2]), "accept_lengths are 3, decoding_steps to 7", UNSOUND),
    (_row(18, token_ids=[[1], [2]]), "[1, 1] token ids, but new_tokens [4, 2]", UNSOUND),
    (failed_row(19, "qa", "too long"), "failed: too long", UNUSABLE),
    (failed_row(20, "qa") | {"error": None}, "failed: no answer", UNUSABLE),
    (_row(21), "is answered again further down", BROKEN),
    (_of_steps(22, [6, 1]), "turn 0 has 4 new tokens in 6 steps", BROKEN),
    (_of_steps(23, [2, 0]), "turn 1 has 2 new tokens in 0 steps", BROKEN),
    (_row(24, prefill_time=[0.1, 0.1], decode_time=[24.5, 0.1]), "decoding 24.5 s", BROKEN),
    (_row(25, prefill_time=[0.1, 0.1], decode_time=[1.0, -0.1]), "decoding -0.1 s", BROKEN),
    (_row(26, prefill_time=[0.1, 0.1], decode_time=[26.4, 26.1]), None, None),
    (_row(27) | {"tstamp": 4e9}, "was written in the future", BROKEN),
    (_row(21, wall_time=[0.7654321, 0.1234567]), None, None),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """All cases in one file, blank lines between them."""
    path = write_answers(tmp_path / "a.jsonl", [case[0] for case in CASES], META)
    path.write_text(path.read_text().replace("\n", "\n\n"))
    return path


def test_every_defect_is_flagged_on_its_line(file: Path) -> None:
    defects = find_defects(file, read_lines(file))
    by_line = {line: [it for it in defects if it.line == line] for line in range(1, 2 * len(CASES))}
    for number, (row, what, effect) in enumerate(CASES):
        found = by_line.pop(2 * number + 1)
        if what is None:
            assert found == [], f"question {row['question_id']} is sound"
            continue
        assert [(it.question_id, it.effect) for it in found] == [(row["question_id"], effect)]
        assert str(found[0]).startswith(f"{file}:{2 * number + 1}: question {row['question_id']}: ")
        assert what in found[0].what
    assert not any(by_line.values())


def test_counters_repeated_over_rows_are_stale(tmp_path: Path) -> None:
    first, second = _row(1), _row(2)
    last = (first["choices"][0]["new_tokens"][1], first["choices"][0]["wall_time"][1])
    second["choices"][0] |= {"new_tokens": [last[0], 4], "wall_time": [last[1], 0.7]}
    both = write_answers(tmp_path / "a.jsonl", [first, second])
    (defect,) = find_defects(both, read_lines(both))
    assert (defect.line, defect.effect) == (2, UNSOUND)


def test_frames_say_which_rows_figures_may_take(file: Path) -> None:
    frame = question_frame([row for _, row in read_lines(file)], 8)
    worst = [effect for _, _, effect in CASES]
    assert frame["is_flawless"].tolist() == [effect is None for effect in worst]
    assert frame["is_sound"].tolist() == [effect in (None, LISTED) for effect in worst]
    assert frame["is_usable"].tolist() == [effect is not UNUSABLE for effect in worst]
    overshoot = frame[frame["question_id"] == 6].iloc[0]
    assert (overshoot["first_tokens"], overshoot["tokens"]) == (13, 10)


def test_the_limit_may_be_given_where_no_sidecar_has_it(tmp_path: Path, capsys: Capture) -> None:
    path = str(write_answers(tmp_path / "a.jsonl", [_row(1)]))
    assert find_defects(path, read_lines(path)) == []
    assert main([path, "--max-new-tokens", "3"]) == 1
    assert "1 past the limit of 3" in capsys.readouterr().out
    with pytest.raises(UserError, match="--max-new-tokens: got 0"):
        main([path, "--max-new-tokens", "0"])


def test_the_command_lists_defects_and_missing_rows(
    file: Path, tmp_path: Path, capsys: Capture
) -> None:
    good = str(write_answers(tmp_path / "good.jsonl", random_rows(0)[:2]))
    assert main([good]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "no defect"
    assert main([str(file), good]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    num_own = sum(what is not None for _, what, _ in CASES)
    missing = [line for line in lines if "is missing" in line]
    # 81 and 82 are in the good file alone, the questions of the cases in the other.
    num_others = len({row["question_id"] for row, _, _ in CASES})
    assert missing[0].startswith(f"{file}: question 81: is missing, another file has it")
    assert json.loads(last) == {
        "defects": num_own + 2 + num_others,
        "files": {str(file): num_own + 2, good: num_others},
    }
    assert lines[-1] == f"{num_own + 2 + num_others} defects"


def test_a_pipe_is_read_once(tmp_path: Path, capsys: Capture) -> None:
    content = write_answers(tmp_path / "a.jsonl", [_row(1)]).read_bytes()
    other = write_answers(tmp_path / "b.jsonl", [_row(1), _row(2)])
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = Thread(target=pipe.write_bytes, args=(content,), daemon=True)
    writer.start()
    assert main([str(pipe), str(other)]) == 1
    assert f"{pipe}: question 2: is missing" in capsys.readouterr().out
