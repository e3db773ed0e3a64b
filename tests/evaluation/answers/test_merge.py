"""Shards put together are the run that one command would have made, or are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evaluation.answers.merge import main
from evaluation.answers.record import sidecar_path
from model.commands.command_line import UserError
from tests.evaluation.conftest import figures, read_meta, read_rows, run

COUNT = 3


@pytest.fixture(scope="module")
def shards(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The answers of plain decoding in three shards, and of all in one."""
    folder = tmp_path_factory.mktemp("shards")
    short = f"--model-path {tiny_model} --threads 1 --warmup 0 --max-new-tokens 5 --question-end 7"
    files = [folder / f"{index}.jsonl" for index in range(COUNT + 1)]
    run("vanilla", short.split(), files[0])
    for index in range(1, COUNT + 1):
        run("vanilla", short.split(), files[index], "--shard", f"{index}/{COUNT}")
    return files


def merged(shards: list[Path], out: Path, *more: str) -> int:
    return main([*map(str, shards), "--out", str(out), *more])


def test_merged_shards_are_the_undivided_run(shards: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "all.jsonl"
    assert merged([shards[3], shards[1], shards[2]], out) == 0
    rows, whole = read_rows(out), read_rows(shards[0])
    assert [row["question_id"] for row in rows] == [row["question_id"] for row in whole]
    assert figures(rows, "token_ids", "turns") == figures(whole, "token_ids", "turns")
    assert [row["shard"] for row in rows] == [1, 2, 3, 1, 2, 3, 1]
    assert [row["questions_before"] for row in rows] == [0, 0, 0, 1, 1, 1, 2]
    meta = read_meta(out)
    assert meta["shard"] is None
    assert [part["shard"] for part in meta["merged_from"]] == ["1/3", "2/3", "3/3"]
    assert meta["end_time"] >= read_meta(shards[3])["end_time"]
    assert meta["num_rows"] == 7


def test_a_result_that_is_there_is_kept(shards: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "all.jsonl"
    out.write_text("precious")
    with pytest.raises(UserError, match="--overwrite"):
        merged(shards[1:], out)
    with pytest.raises(UserError, match=r"overwrite: .* is not an answer file"):
        merged(shards[1:], out, "--overwrite")
    assert out.read_text() == "precious"
    out.write_bytes(shards[0].read_bytes())
    assert merged(shards[1:], out, "--overwrite") == 0
    with pytest.raises(UserError, match="one of the shards"):
        merged(shards[1:], shards[1], "--overwrite")
    sidecar = sidecar_path(shards[1])
    before = sidecar.read_bytes()
    namesake = shards[1].with_suffix("")
    for taken, says in ((sidecar, "one of the shards"), (namesake, "both would use 1.meta.json")):
        with pytest.raises(UserError, match=says):
            merged(shards[1:], taken, "--overwrite")
    assert sidecar.read_bytes() == before


@pytest.mark.parametrize(
    ("chosen", "says"),
    [([1, 2], "allowed: each of 3 once"), ([1, 2, 2], "allowed: each"), ([0, 1], "is not a shard")],
)
def test_half_a_run_is_refused(
    chosen: list[int], says: str, shards: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        merged([shards[index] for index in chosen], tmp_path / "all.jsonl")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"end_time": None}, "not finished"),
        ({"start_time": "monday"}, "not finished"),
        ({"dtype": "bfloat16"}, "dtype 'bfloat16'"),
        ({"question_end": 2}, "question_end 2"),
        ({"shard": "2/4"}, "allowed: each"),
        ({"shard": "x/y"}, "is not a shard"),
    ],
)
def test_a_shard_of_another_run_is_refused(
    change: dict[str, object], says: str, shards: list[Path], tmp_path: Path
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes(shards[2].read_bytes())
    other.with_suffix(".meta.json").write_text(json.dumps(read_meta(shards[2]) | change))
    with pytest.raises(UserError, match=says):
        merged([shards[1], other, shards[3]], tmp_path / "all.jsonl")


def test_a_question_in_two_shards_is_refused(shards: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes(shards[2].read_bytes() + shards[1].read_bytes())
    other.with_suffix(".meta.json").write_text(json.dumps(read_meta(shards[2])))
    with pytest.raises(UserError, match="in another shard"):
        merged([shards[1], other, shards[3]], tmp_path / "all.jsonl")


def test_a_shard_that_lost_rows_is_refused(shards: list[Path], tmp_path: Path) -> None:
    for index, num_kept in ((1, 1), (2, 1), (1, 2)):
        short = tmp_path / "short.jsonl"
        lines = shards[index].read_text().splitlines(keepends=True)
        short.write_text("".join(lines[:num_kept]))
        short.with_suffix(".meta.json").write_text(json.dumps(read_meta(shards[index])))
        given = [short if number == index else shards[number] for number in (1, 2, 3)]
        if num_kept == 2 and index == 1:  # as many as the others: a run of six questions
            assert merged(given, tmp_path / "all.jsonl", "--overwrite") == 0
            continue
        with pytest.raises(UserError, match="run the short one again"):
            merged(given, tmp_path / "all.jsonl", "--overwrite")
