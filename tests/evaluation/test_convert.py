"""Each format is written from answers with the figures of their steps; the three averages keep their names.

Run: pytest tests/evaluation/test_convert.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.answers.answer_file import read_answers
from evaluation.answers.row import AnswerRow
from evaluation.answers.step_figures import (
    TurnSteps,
    acceptance_sums,
    by_position,
    by_start_length,
    by_turn,
    turn_steps,
)
from evaluation.convert import main
from model.commands.command_line import UserError
from model.serve.acceptance import StepCounts, vllm_fields
from tests.evaluation.answers.answer_rows import make_row
from tests.evaluation.conftest import read_meta, read_rows, run, write_rows

Capture = pytest.CaptureFixture[str]
# Steps of two turns: (tokens, drafted nodes).
FIRST = [(3, 4), (1, 0), (1, 4), (4, 4)]
SECOND = [(1, 0), (2, 4)]


def _row(question_id: int, category: str, *turns: list[tuple[int, int]]) -> dict[str, Any]:
    lengths = [tokens for turn in turns for tokens, _ in turn]
    keys = {
        "decoding_steps": [len(turn) for turn in turns],
        "new_tokens": [sum(tokens for tokens, _ in turn) for turn in turns],
        "wall_time": [1.0 + place for place in range(len(turns))],
        "step_nodes": [[nodes for _, nodes in turn] for turn in turns],
        # Four levels of a chain, of which the first ones were accepted.
        "accepted": [
            [[sum(tokens - 1 >= depth for tokens, nodes in turn if nodes)] for depth in range(1, 5)]
            for turn in turns
        ],
        "drafted": [[[sum(nodes > 0 for _, nodes in turn)]] * 4 for turn in turns],
        "prompt_tokens": [4000 + 200 * place for place in range(len(turns))],
        "time_to_first_token": [0.25] * len(turns),
    }
    texts = [f"answer {place}" for place in range(len(turns))]
    return make_row(question_id, category, lengths, 1.0, turns=texts, **keys)


ROWS = [_row(1, "coding", FIRST, SECOND), _row(2, "coding", SECOND), _row(3, "qa", FIRST)]


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """An answer file with a sidecar."""
    file = write_rows(tmp_path / "answers.jsonl", ROWS)
    meta = {"method": "pld", "model_path": "org/model", "max_new_tokens": 64, "temperature": 0.0}
    (tmp_path / "answers.meta.json").write_text(json.dumps(meta))
    return file


def _turns() -> list[TurnSteps]:
    return turn_steps([AnswerRow.of(row) for row in ROWS])


def test_three_averages_are_three_figures() -> None:
    sums = acceptance_sums(_turns())
    # 12 steps emit 9 + 3 + 3 + 9 tokens; 8 of them drafted, and 5 + 1 + 1 + 5 drafted tokens were accepted.
    assert sums.per_step == 24 / 12
    assert sums.per_drafted_step == 1 + 12 / 8
    assert sums.per_request == pytest.approx((12 / 6 + 3 / 2 + 9 / 4) / 3)
    assert (sums.drafts, sums.draft_tokens, sums.accepted) == (8, 32, 12)


def test_a_profile_has_the_rates_of_the_histogram(answers: Path, tmp_path: Path) -> None:
    file = tmp_path / "speculation_profile.json"
    assert main([str(answers), "--to", "speculation-profile", "--out", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["schema_version"] == "1.0"
    assert found["acceptance_length_histogram"] == {"1": 6, "2": 2, "3": 2, "4": 2}
    assert found["marginal_accept_rates"] == [0.5, 0.333333, 0.166667]
    assert found["conditional_accept_rates"] == [0.5, 0.666667, 0.5]
    assert found["validation"]["mean_consistency"]["passed"]
    assert found["accept_length_by_k"] == {"3": 2.0}
    assert found["measurement_conditions"] == {"max_new_tokens": 64, "temperature": 0.0}
    assert found["mean_accept_length_per_request"] == round(
        acceptance_sums(_turns()).per_request, 6
    )
    assert found["per_category"]["qa"]["mean_accept_length"] == 9 / 4


def test_vllm_s_requests_have_the_drafted_steps(answers: Path, tmp_path: Path) -> None:
    file = tmp_path / "raw_requests.jsonl"
    assert main([str(answers), "--to", "vllm", "--out", str(file)]) == 0
    first = read_rows(file)[0]
    assert first["prompt_tokens"] == 4000
    assert first["metrics"]["per_step_accepted"] == [2, 0, 3]
    assert first["metrics"]["acceptance_histogram"] == [1, 0, 1, 1, 0]
    drafts = sum(row["metrics"]["num_spec_steps"] for row in read_rows(file))
    assert drafts == acceptance_sums(_turns()).drafts


def test_steps_that_the_limit_cut_have_the_accepted_tokens_that_were_counted() -> None:
    row = _row(1, "qa", [(3, 4), (2, 4)])
    # The last step had no room for the model's own token: both of its tokens are accepted drafts.
    row["choices"][0]["accepted"] = [[[2], [2], [0], [0]]]
    (turn,) = turn_steps([AnswerRow.of(row)])
    assert turn.steps == [StepCounts(3, 4, 2, 4), StepCounts(2, 4, 2, 4)]


def test_a_server_s_steps_are_those_of_its_fields_and_the_plain_ones() -> None:
    row = _row(1, "qa", FIRST)
    choice = row["choices"][0]
    (ours,) = turn_steps([AnswerRow.of(row)])
    choice["speculative_decoding"] = [vllm_fields(ours.steps)]
    del choice["accept_lengths"]
    (served,) = turn_steps([AnswerRow.of(row)])
    assert sorted(served.steps) == sorted(ours.steps)
    assert not served.is_in_order
    assert by_position([served]) == {}
    for key in ("per_step_accepted", "per_step_drafted"):  # vLLM's level "summary"
        del choice["speculative_decoding"][0][key]
    (summary,) = turn_steps([AnswerRow.of(row)])
    assert acceptance_sums([summary]) == acceptance_sums([ours])


def test_bins_are_by_turn_and_by_what_stands_before_a_step() -> None:
    turns = _turns()
    assert {name: len(part) for name, part in by_turn(turns).items()} == {"1": 3, "2": 1}
    assert [len(part) for part in by_start_length(turns, (0, 4000, 4100)).values()] == [3, 1]
    turn = turns[0]._replace(prompt_tokens=5)
    parts = by_position([turn], 4)
    # Steps of 3, 1, 1 and 4 tokens begin after 5, 8, 9 and 10.
    assert {name: [step.tokens for step in part[0].steps] for name, part in parts.items()} == {
        "4-8": [3],
        "8-12": [1, 1, 4],
    }


def test_answers_of_a_run_tell_all_that_the_formats_need(
    options: list[str], tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "pld.jsonl"
    assert run("pld", options, file) == 0
    rows = read_answers(file)
    turns = turn_steps(rows)
    assert sum(len(turn.steps) for turn in turns) == sum(
        sum(choice.decoding_steps) for row in rows for choice in row.choices
    )
    sums = acceptance_sums(turns)
    assert 0 < sums.drafts < sums.num_steps
    assert sums.draft_tokens == sum(sum(row.choices[0].draft_tokens) for row in rows)
    assert sums.accepted == sum(
        count for row in rows for turn in row.choices[0].accepted for it in turn for count in it
    )
    assert read_meta(file)["method"] == "pld"
    capsys.readouterr()
    assert main([str(file)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["acceptance"]["all"]["tokens_per_drafted_step"] == sums.per_drafted_step
    assert {"Acceptance by turn of the conversation", "Acceptance by tokens of the prompt"} <= set(
        report
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{answers}", "--to", "vllm"], "to, out: got only one of them"),
        (["{folder}"], "cannot read the answer file"),
        (["{folder}/texts.jsonl"], "has no record of steps"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, answers: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    texts = _row(1, "qa", FIRST)
    for key in ("accept_lengths", "decoding_steps"):
        del texts["choices"][0][key]
    write_rows(folder / "texts.jsonl", [texts])
    with pytest.raises(UserError, match=message):
        main([word.format(answers=answers, folder=folder) for word in words])
