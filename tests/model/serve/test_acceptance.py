"""Counts of steps, and vLLM's fields made of them.

Run: pytest tests/model/serve/test_acceptance.py
"""

from __future__ import annotations

import pytest

from model.engine.step import StepRecord
from model.engine.tree import DraftTree
from model.serve.acceptance import StepCounts, vllm_fields
from tests.model.api.test_decoder import decoder_for, demo

CHAIN = DraftTree.chain([5, 6, 7, 8])
TREE = DraftTree.from_lists([5, 6, 7, 8], (-1, 0, 0, 2))
ROOT = DraftTree.chain([9])
RECORDS = [
    StepRecord([6, 7, 3], CHAIN, [0, 1, 2]),  # two of three accepted, and a bonus token
    StepRecord([4], ROOT, [0]),  # no draft
    StepRecord([7, 8, 2], TREE, [0, 2, 3]),
    StepRecord([1], CHAIN, [0]),
    StepRecord(
        [6, 7], CHAIN, [0, 1, 2, 3]
    ),  # the limit cuts it: the third accepted token is not emitted
]


def test_steps_without_a_draft_count_here_and_not_in_the_fields_of_vllm() -> None:
    steps = [StepCounts.of(record) for record in RECORDS]
    assert [step.tokens for step in steps] == [3, 1, 3, 1, 2]
    assert vllm_fields(steps) == {
        "mean_acceptance_length": 1 + 6 / 4,
        "draft_acceptance_rate": 6 / 12,
        "acceptance_histogram": [1, 0, 3, 0],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 12,
        "num_spec_tokens": 3,
        "per_step_accepted": [2, 2, 0, 2],
        "per_step_drafted": [3, 3, 3, 3],
    }


def test_tokens_after_a_stop_string_are_no_accepted_ones() -> None:
    assert StepCounts.of(RECORDS[0], num_tokens=1) == (1, 3, 1, 3)


def test_an_answer_without_drafts_has_all_fields() -> None:
    fields = vllm_fields([StepCounts.of(RECORDS[1])])
    assert fields["mean_acceptance_length"] == 1 and fields["acceptance_histogram"] == [0]
    assert vllm_fields([]) == {**fields}


@pytest.mark.parametrize("method", ["recycling", "pld", "hybrid"])
def test_the_sums_of_real_answers_agree(method: str) -> None:
    output = decoder_for(method, *demo()).generate(
        "USER: Tell me of a boat. ASSISTANT:", max_new_tokens=40
    )
    steps = [StepCounts.of(step) for step in output.steps]
    fields = vllm_fields(steps)
    histogram = fields["acceptance_histogram"]
    assert [step.tokens for step in steps] == output.accept_lengths
    assert sum(histogram) == fields["num_spec_steps"] > 0
    assert sum(j * count for j, count in enumerate(histogram)) == sum(fields["per_step_accepted"])
    for accepted, drafted in zip(
        fields["per_step_accepted"], fields["per_step_drafted"], strict=True
    ):
        assert 0 <= accepted <= drafted
    # every step but a cut last one adds one token of the model's own
    bonus = len(output.token_ids) - fields["num_accepted_draft_tokens"]
    assert len(output.steps) - 1 <= bonus <= len(output.steps)
