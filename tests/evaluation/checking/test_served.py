"""Two servers' answers, or a server's and a method's, part at a tie or by a bug: by the model, or by logprobs.

Run: pytest tests/evaluation/checking/test_served.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evaluation import endpoint
from evaluation.answers.differences import compare_answers
from evaluation.answers.row import AnswerRow
from evaluation.checking import rerun as rerun_module
from evaluation.checking.logprobs import NOT_JUDGED, judge_logprobs
from evaluation.checking.tie_or_bug import BUG, NOISE_QUANTILE, TIE, Judge, judge_tokens
from evaluation.equal import main
from model.commands.command_line import UserError
from tests.evaluation.answers.answer_rows import make_row
from tests.evaluation.conftest import read_meta, read_rows, run, write_rows
from tests.evaluation.fake_server import fake_server

VOCAB = 2000
NUM_TIES, NUM_BUGS = 500, 20


def _decoded(logits: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Logits as a half-precision engine has them: with errors of its own, rounded to bfloat16."""
    return torch.from_numpy(logits + noise).bfloat16().float().numpy()


def test_planted_ties_are_ties_and_planted_bugs_are_bugs() -> None:
    draws = np.random.default_rng(7)
    size = 0.02  # of an engine's errors; bfloat16 rounds logits of 8 to 16 by up to 0.03

    def engine(logits: np.ndarray) -> np.ndarray:
        return _decoded(logits, draws.normal(0, size, VOCAB))

    reference = [draws.normal(0, 3, VOCAB) for _ in range(1000)]
    errors = [float(np.abs(engine(logits) - logits).max()) for logits in reference]
    bound = 2 * float(np.quantile(errors, NOISE_QUANTILE))
    ties = []
    while len(ties) < NUM_TIES:
        logits = draws.normal(0, 3, VOCAB)
        order = np.argsort(logits)
        logits[order[-1]] = logits[order[-2]] + draws.uniform(0, size)
        one, other = (int(engine(logits).argmax()) for _ in range(2))
        if one != other:
            ties.append((logits, one, other))
    false_alarms = [
        tokens
        for logits, *tokens in ties
        if judge_tokens(logits, (logits[tokens[0]], logits[tokens[1]]), bound)[0] == BUG
    ]
    assert not false_alarms
    bugs = {
        "another position's logits": lambda logits, place: reference[place - 1],
        "ids shifted by one": lambda logits, place: np.roll(logits, 1),
        "the largest left out": lambda logits, place: np.where(logits == logits.max(), -99, logits),
        "a draft accepted unseen": lambda logits, place: np.eye(VOCAB)[place] * 99,
        "a sign lost": lambda logits, place: -logits,
    }
    found = 0
    for place in range(1, NUM_BUGS + 1):
        wrong = list(bugs.values())[place % len(bugs)]
        logits = reference[place]
        one, other = int(engine(logits).argmax()), int(engine(wrong(logits, place)).argmax())
        assert one != other, "the bug shows nothing"
        found += judge_tokens(logits, (logits[one], logits[other]), bound)[0] == BUG
    assert found == NUM_BUGS


def _content(*places: dict[str, float]) -> list[dict[str, Any]]:
    """OpenAI's `logprobs.content`: the first token of each place is the one that was said."""
    return [
        {
            "token": next(iter(place)),
            "logprob": next(iter(place.values())),
            "top_logprobs": [{"token": name, "logprob": value} for name, value in place.items()],
        }
        for place in places
    ]


@pytest.mark.parametrize(
    ("texts", "verdict", "cause"),
    [
        (("A red car", "A rod car"), TIE, "' red' and ' rod' stand 0 and 0.1 nats below"),
        (("A red car", "A blue car"), BUG, "' red' and ' blue' stand 0 and 3 nats below"),
        # Neither is the likeliest: two wrong answers do not make a tie.
        (("A blue car", "A black car"), BUG, "stand 3 and 3.1 nats below"),
        (("A red car", "A green car"), BUG, "no token of ' green car' is among the 4 likeliest"),
        (("A red", "A red car"), NOT_JUDGED, "one text ends where they begin to differ"),
        (("The red car", "The blue car"), NOT_JUDGED, "the server parts from both at character 0"),
        (("A red car x", "A red car y"), NOT_JUDGED, "answer ends before the two part"),
    ],
)
def test_log_probabilities_tell_ties_from_bugs(
    texts: tuple[str, str], verdict: str, cause: str
) -> None:
    likely = {" red": -0.9, " rod": -1.0, " blue": -3.9, " black": -4.0}
    found = judge_logprobs(_content({"A": 0.0}, likely, {" car": 0.0}), texts)
    assert found.verdict == verdict
    assert cause in str(found)


def _served(url: str, folder: Path, name: str) -> Path:
    short = ["--question-end", "3", "--max-new-tokens", "8", "--warmup", "0"]
    endpoint.main(["--base-url", url, "--out", str(folder), "--model-id", name, *short])
    return folder / f"{name}-temp-0.0-8.jsonl"


def test_two_servers_are_judged_by_the_log_probabilities_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def likely(words: list[str], place: int) -> dict[str, float]:
        return {words[place]: -0.5, " texts,": -0.6 if len(words) > 5 else -9.0}

    with (
        fake_server(logprobs=likely) as (url, server),
        fake_server(answer=_other, vocabulary=server.vocabulary) as (other_url, _),
    ):
        files = [_served(url, tmp_path, "one"), _served(other_url, tmp_path, "other")]
        words = ["--jsonfile1", str(files[0]), "--jsonfile2", str(files[1])]
        assert main(words) == 1
        capsys.readouterr()
        assert main([*words, "--judge-url", url, "--keep-verdict"]) == 0
        *lines, report = capsys.readouterr().out.splitlines()
    assert "\n".join(lines).count("tie: ' messages,' and ' texts,' stand 0 and 0.1 nats below") == 3
    assert json.loads(report)["judged"]["ties"] == 3
    assert (tmp_path / "other-temp-0.0-8.equal.json").exists()


def _other(messages: list[dict[str, Any]]) -> str:
    return f"{len(messages)} texts, the last of {len(messages[-1]['content'].split())} words."


def _row(question_id: int, **keys: Any) -> AnswerRow:
    return AnswerRow.of(make_row(question_id, "qa", [2], 1.0, **keys))


def test_tool_calls_are_compared_with_their_arguments() -> None:
    def row(arguments: str, **keys: Any) -> AnswerRow:
        return _row(1, turns=[""], tool_calls=[[["look_up", arguments]]], **keys)

    found = compare_answers([row('{"word": "tree"}')], [row('{"word": "free"}')]).differences
    assert found[0].cause == "arguments of tool call 0 (look_up) differ"
    assert found[0].position == 10
    equal = compare_answers([row("{}")], [row("{}")])
    assert (equal.differences, equal.num_turns_by_text) == ([], 1)
    (lacking,) = compare_answers([row("{}")], [_row(1, turns=[""])]).differences
    assert lacking.cause == "names of tool call 0 differ"
    with_ids = [row("{}", token_ids=[[1, 2]]), row("[]", token_ids=[[1, 3]])]
    (parted,) = compare_answers(with_ids[:1], with_ids[1:]).differences
    assert parted.cause == "tokens differ: arguments of tool call 0 (look_up) differ"
    assert (parted.unit, parted.position, parted.parts_at_tokens) == ("token", 1, True)


@pytest.fixture(scope="module")
def answers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain answers in bfloat16, and the same as a server would have given them."""
    folder = tmp_path_factory.mktemp("served")
    short = "--threads 1 --warmup 0 --max-new-tokens 12 --question-end 2 --dtype bfloat16"
    assert run("vanilla", ["--model-path", tiny_model, *short.split()], folder / "a.jsonl") == 0
    meta = read_meta(folder / "a.jsonl") | {"is_served": True, "method": "http://x"}
    del meta["dtype"], meta["device"]
    (folder / "b.meta.json").write_text(json.dumps(meta))
    return folder


@pytest.mark.parametrize("has_ids", [True, False])
def test_a_server_s_wrong_word_is_a_bug_by_the_model_that_it_serves(
    answers: Path, tiny_model: Path, has_ids: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = read_rows(answers / "a.jsonl")
    choice = rows[-1]["choices"][0]
    choice["turns"][-1] = choice["turns"][-1][:6] + " zebra"
    choice["token_ids"][-1][2] = 5
    if not has_ids:
        for row in rows:
            del row["choices"][0]["token_ids"]
    write_rows(answers / "b.jsonl", rows)
    words = ["--file-path", str(answers), "--jsonfile1", "a.jsonl", "--jsonfile2", "b.jsonl"]
    words += ["--model-path", str(tiny_model)]
    assert main([*words, "--served-dtype", "bfloat16"]) == 1
    out = capsys.readouterr().out
    assert "BUG: tokens" in out
    assert "not judged" not in out
    with pytest.raises(UserError, match="served_dtype: got none with a server among the files"):
        main(words)


def test_a_difference_within_the_noise_is_a_server_s_tie(
    answers: Path,
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoisyJudge(Judge):
        """Plain decoding's errors, had it any size."""

        noise = 99.0

    monkeypatch.setattr(rerun_module, "Judge", NoisyJudge)
    rows = read_rows(answers / "a.jsonl")
    rows[-1]["choices"][0]["token_ids"][-1][2] = 5
    write_rows(answers / "b.jsonl", rows)
    words = ["--file-path", str(answers), "--jsonfile1", "a.jsonl", "--jsonfile2", "b.jsonl"]
    words += ["--model-path", str(tiny_model), "--served-dtype", "bfloat16"]
    assert main(words) == 0
    assert "tie: tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--judge-url", "http://x", "--model-path", "m"], "model_path, judge_url: got both"),
        (["--served-dtype", "float16"], "served_dtype: got it without --model-path"),
        (["--served-model", "m"], "served_model: got it without --judge-url"),
        (["--keep-verdict"], "keep_verdict: got it without --model-path"),
    ],
)
def test_options_for_nothing_are_refused(options: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        main(["--jsonfile1", "a", "--jsonfile2", "b", *options])
