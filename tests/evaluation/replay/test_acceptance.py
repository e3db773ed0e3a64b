"""No change alters drafts unnoticed: acceptance lengths on the demo model's trace are those of a run on the model.

After a change that is meant to alter them: python -m tests.evaluation.replay.test_acceptance

Run: pytest tests/evaluation/replay/test_acceptance.py
"""

from __future__ import annotations

import hashlib
import json
from itertools import islice
from pathlib import Path

import pytest

from evaluation.replay.replaying import Replay, replayable
from evaluation.replay.trace import RecordedQuestion, Source, questions_of

TRACE = Path(__file__).resolve().parents[3] / "data/bank/demo"
LENGTHS = Path(__file__).with_name("lengths.json")
NUM_QUESTIONS = 30


def questions() -> list[RecordedQuestion]:
    return list(islice(questions_of(TRACE / "spec_bench.trace"), NUM_QUESTIONS))


def found(words: str, asked: list[RecordedQuestion]) -> dict[str, object]:
    """Return a method's steps on the first questions, and a hash of all acceptance lengths."""
    run = Replay(Source.read(TRACE), replayable(words))
    for question in asked:
        run.answer(question)
    assert run.counts.unrecorded_steps == 0
    lengths = json.dumps(run.counts.accept_lengths).encode()
    digest = hashlib.sha256(lengths).hexdigest()
    return {"tokens": run.counts.tokens, "steps": run.counts.steps, "sha256": digest}


@pytest.fixture(scope="module")
def asked() -> list[RecordedQuestion]:
    return questions()


@pytest.mark.parametrize("words", Source.read(TRACE).methods)
def test_acceptance_lengths_are_those_of_the_model(
    words: str, asked: list[RecordedQuestion]
) -> None:
    assert found(words, asked) == json.loads(LENGTHS.read_text())[words]


if __name__ == "__main__":
    new = {words: found(words, questions()) for words in Source.read(TRACE).methods}
    LENGTHS.write_text(json.dumps(new, indent=1) + "\n")
