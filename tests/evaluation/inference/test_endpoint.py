"""Servers answer into the same answer files, in turn with methods or alone; their errors are one line.

Run: pytest tests/evaluation/inference/test_endpoint.py
"""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from evaluation import compare, convert, endpoint
from evaluation.answers.answer_file import read_answers, read_lines
from evaluation.answers.defects import find_defects
from evaluation.inference.client import read_counters
from evaluation.inference.servers import ShareClock
from evaluation.questions.questions import load_questions, question_file_of
from evaluation.reporting.leaderboard_tables import group_tables, pairs_table
from evaluation.scoring.comparable import group_answers, load_answers
from model.commands.command_line import UserError
from tests.evaluation.conftest import read_meta, read_rows
from tests.evaluation.fake_server import fake_server
from tests.hang import HANG

FEW = ["--question-end", "4", "--max-new-tokens", "6", "--warmup", "0"]


def asked(url: str, folder: Path, *more: str) -> list[dict[str, Any]]:
    """Return the rows of a server that was asked alone."""
    endpoint.main(["--base-url", url, "--out", str(folder), *FEW, *more])
    return read_rows(folder / "served-temp-0.0-6.jsonl")


def test_a_server_answers_every_turn_with_what_was_said_before(tmp_path: Path) -> None:
    with fake_server() as (url, server):
        rows = asked(url, tmp_path)
    questions = load_questions(question_file_of("demo"), end=4)
    assert [row["question_id"] for row in rows] == [one.question_id for one in questions]
    for row, question in zip(rows, questions, strict=True):
        (choice,) = row["choices"]
        for turn, user in enumerate(question.turns):
            words = f"{2 * turn + 1} messages, the last of {len(user.split())} words.".split()
            assert choice["turns"][turn] == " ".join(words[:6])  # without spaces around it
            assert choice["new_tokens"][turn] == len(choice["token_ids"][turn]) == 6
            # Three chunks of two words: a target's token and an accepted draft in each step.
            assert choice["decoding_steps"][turn] == 3 == len(choice["chunk_times"][turn])
            first, wall = choice["time_to_first_token"][turn], choice["wall_time"][turn]
            assert first == pytest.approx(choice["chunk_times"][turn][0], abs=1e-5)
            assert 0 < first <= wall
    assert not [
        flaw for flaw in find_defects("x", read_lines(tmp_path / "served-temp-0.0-6.jsonl"))
    ]
    history = [one["content"] for request in server.requests for one in request["messages"]]
    assert history == [one.strip() for one in history]
    sent = server.requests[0]
    assert (sent["temperature"], sent["max_tokens"], sent["stream"]) == (0.0, 6, True)
    assert not {"seed", "top_k", "min_p", "stop"} & set(sent)
    meta = read_meta(tmp_path / "served-temp-0.0-6.jsonl")
    assert (meta["method"], meta["model_path"], meta["is_served"]) == (url, "fake", True)
    assert not {"dtype", "device", "threads", "kernels"} & set(meta)


def test_acceptance_comes_from_counters_where_responses_lack_it(tmp_path: Path) -> None:
    with fake_server(metrics=False, counters=True) as (url, _):
        rows = asked(url, tmp_path / "counters")
    assert {tuple(row["choices"][0]["decoding_steps"]) for row in rows} == {(3, 3)}
    with fake_server(metrics=False) as (url, _):
        rows = asked(url, tmp_path / "none")
    assert all("decoding_steps" not in row["choices"][0] for row in rows)
    assert read_counters("vllm:spec_decode_num_drafts_total 3\n") == {}


def test_steps_are_no_fewer_than_those_that_drafted(tmp_path: Path) -> None:
    with fake_server(past_the_end=5) as (url, _):
        rows = asked(url, tmp_path)
    assert {tuple(row["choices"][0]["decoding_steps"]) for row in rows} == {(3, 3)}


def test_our_own_servers_steps_are_taken_as_they_are(tmp_path: Path) -> None:
    with fake_server(own_lengths=[3, 1, 1, 1]) as (url, _):
        rows = asked(url, tmp_path)
    for row in rows:
        assert row["choices"][0]["decoding_steps"] == [4, 4]
        assert row["choices"][0]["accept_lengths"] == [3, 1, 1, 1] * 2
    assert not find_defects("x", read_lines(tmp_path / "served-temp-0.0-6.jsonl"))


def test_sums_of_counters_are_no_steps(tmp_path: Path) -> None:
    with fake_server(metrics=False, counters=True) as (url, _):
        asked(url, tmp_path)
    with pytest.raises(UserError, match=r"has no record of steps .* sums: evaluation\.speed"):
        convert.main([str(tmp_path / "served-temp-0.0-6.jsonl")])


def test_streams_in_odd_forms_are_read(tmp_path: Path) -> None:
    def answer(_: list[dict[str, Any]]) -> str:
        return "line\u2028separator and\x85next line, \u00e9t\u00e9"

    with fake_server(answer=answer, is_odd=True, tool_calls=[("look_up", "{}")]) as (url, _):
        rows = asked(url, tmp_path)
    for row in rows:
        assert "error" not in row
        (choice,) = row["choices"]
        assert choice["turns"] == [answer([])] * 2
        assert choice["tool_calls"] == [[["look_up", "{}"]]] * 2
        assert choice["prompt_tokens"] == [0, 0]


def test_several_requests_are_under_way_and_share_the_time(tmp_path: Path) -> None:
    barrier = threading.Barrier(2, timeout=HANG)

    def wait(messages: list[dict[str, Any]]) -> str:
        if len(messages) == 1:
            barrier.wait()
        return "one two three four"

    with fake_server(answer=wait) as (url, server):
        endpoint.main(["--base-url", url, "--out", str(tmp_path), *FEW, "--concurrency", "2"])
    assert server.most_at_a_time == 2
    file = tmp_path / "served-temp-0.0-6-batch-2.jsonl"
    choices = [row["choices"][0] for row in read_rows(file)]
    assert read_meta(file)["batch_size"] == 2
    assert all(share > 0 for choice in choices for share in choice["share_time"])


def test_shares_add_up_to_the_time_in_which_anything_was_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = ShareClock()

    def at(seconds: float, action: str) -> float:
        now[0] = seconds
        return clock.begin() if action == "begin" else clock.end()

    first = at(1, "begin")
    second = at(3, "begin")
    assert at(7, "end") - first == 2 + 4 / 2
    assert at(8, "end") - second == 4 / 2 + 1
    third = at(20, "begin")  # nothing was under way from 8 to 20
    assert at(21, "end") - third == 1


def test_a_server_without_token_ids_is_asked_without_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_server(gives_token_ids=False) as (url, server):
        rows = asked(url, tmp_path, "--warmup", "1")
    assert "token_ids" not in rows[0]["choices"][0]
    assert sum("return_token_ids" in body for body in server.requests) == 1
    assert f"{url} gives no token ids: texts are compared" in capsys.readouterr().err


def test_tool_calls_are_kept_as_generated(tmp_path: Path) -> None:
    with fake_server(tool_calls=[("look_up", '{"word": "tree"}'), ("end", "{}")]) as (url, _):
        rows = asked(url, tmp_path)
    assert rows[0]["choices"][0]["tool_calls"][0] == [
        ["look_up", '{"word": "tree"}'],
        ["end", "{}"],
    ]


@pytest.mark.parametrize(
    ("behaviour", "cause"),
    [
        ({"status": 400}, "HTTP 400: the prompt is too long"),
        ({"breaks_off": True}, "the stream ended without data: [DONE]"),
        ({"error": {"error": {"message": "no room"}}}, "the stream broke off: no room"),
        ({"error": {"error": "no room"}}, "the stream broke off: no room"),
        ({"error": {"object": "error", "message": "no room"}}, "the stream broke off: no room"),
        ({"error": {"message": "no room", "code": 500}}, "the stream broke off: no room"),
    ],
)
def test_a_question_that_fails_has_its_cause_and_the_run_goes_on(
    behaviour: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    with fake_server(**behaviour) as (url, _):
        code = endpoint.main(["--base-url", url, "--out", str(tmp_path), *FEW])
    rows = read_answers(tmp_path / "served-temp-0.0-6.jsonl")
    assert (code, len(rows)) == (1, 4)
    assert {str(row.error).removeprefix(f"endpoint {url}: ") for row in rows} == {cause}


def test_errors_before_the_first_question_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(UserError, match="start the server, or give another address"):
        asked(f"http://127.0.0.1:{port}", tmp_path)
    with pytest.raises(UserError, match=r"base_url: got '127\.0\.0\.1:80'; allowed: an address"):
        asked("127.0.0.1:80", tmp_path)
    with fake_server(models=["a", "b"]) as (url, _):
        with pytest.raises(UserError, match=r"served_model: got none; .* has a, b; name one"):
            asked(url, tmp_path)
        with pytest.raises(UserError, match=r"served_model: got c; .* has a, b"):
            asked(url, tmp_path, "--served-model", "c")
        with pytest.raises(UserError, match="api_key_env: got NO_KEY, which is not set"):
            asked(url, tmp_path, "--served-model", "a", "--api-key-env", "NO_KEY")
        with pytest.raises(UserError, match="concurrency: got 1 1; allowed: 1 or more, each once"):
            asked(url, tmp_path, "--served-model", "a", "--concurrency", "1", "1")

    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(UserError, match="pip install httpx"):
        asked(url, tmp_path)
    assert not list(tmp_path.iterdir()), "nothing is left where nothing was asked"


def test_an_api_key_is_sent_and_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "very-secret")
    with fake_server(api_key="very-secret") as (url, _):
        rows = asked(url + "/v1/", tmp_path, "--api-key-env", "SOME_KEY")
    assert "error" not in rows[0]
    assert "very-secret" not in "".join(file.read_text() for file in tmp_path.iterdir())


def test_a_cut_run_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "served-temp-0.0-6.jsonl"
    with fake_server() as (url, server):
        whole = asked(url, tmp_path)
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[:2]))
        server.requests.clear()
        again = asked(url, tmp_path)
        assert len(server.requests) == sum(len(row["choices"][0]["turns"]) for row in whole[2:])
    assert [row["choices"][0]["turns"] for row in again] == [
        row["choices"][0]["turns"] for row in whole
    ]


def test_methods_and_servers_answer_in_turn_and_share_a_table(
    options: list[str], tmp_path: Path
) -> None:
    few = [*options, "--question-end", "2"]
    with fake_server(cached_tokens=1) as (url, _):
        methods = ["--methods", "vanilla", url, "--out", str(tmp_path)]
        assert compare.main([*few, *methods]) == 0
    files = sorted(tmp_path.glob("*.jsonl"))
    assert len(files) == 3
    runs = {read_meta(file)["interleaved_run"] for file in files}
    assert len(runs) == 1
    (group,) = group_answers([load_answers(file) for file in files])
    assert {row.entry.method for row in group.rows} == {"vanilla", url}
    assert group.baseline.method == "vanilla"
    (served,) = (row for row in group.rows if row.entry.method == url)
    assert not served.equality.is_broken, "a server's precision is not known"
    assert not served.too_fast
    table = group_tables(group, pairs_table(group))[-1]
    assert table.rows[0][0].text == url
    assert "prefix cache" in table.notes[0]


def test_of_servers_alone_the_first_is_the_baseline_and_answers_twice(tmp_path: Path) -> None:
    few = ["--question-end", "2", "--max-new-tokens", "6", "--warmup", "0", "--runs", "1"]
    with fake_server() as (url, _), fake_server(step=1, models=["other"]) as (other, _):
        assert compare.main([*few, "--methods", url, other, "--out", str(tmp_path)]) == 0
    files = [load_answers(file) for file in sorted(tmp_path.glob("*.jsonl"))]
    assert sorted(str(file.record.role) for file in files) == ["None", "baseline", "noise floor"]
    (group,) = group_answers(files)
    assert group.baseline.method == url
    assert group.floor is not None
    (row,) = (row for row in group.rows if row.entry.method == other)
    assert row.figures.figure("overall", "exact_mean_accepted_tokens") == 1.0
    assert row.equality.num_differing == 0
