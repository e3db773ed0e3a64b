"""Whatever a file of a stranger holds: it is read, or refused in one line; never a traceback.

A case is one file handed to a parser: one that hypothesis made, or one of its mutants. FUZZ_CASES in
the environment is the number of cases for each parser; the suite tries a few.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evaluation.answers.answer_file import read_answers
from evaluation.answers.record import RunRecord
from evaluation.inference.config import AnswerOptions, QuestionOptions
from evaluation.questions.questions import load_questions
from evaluation.reporting.published import PUBLISHED_DIR, read_published
from model.commands.command_line import UserError
from model.commands.loading import make_drafter, read_memory
from model.methods import drafter_class, find_method
from model.methods.recycling.drafter import load_template

CASES = int(os.environ.get("FUZZ_CASES", "100"))
MUTANTS = 9
VOCAB = 16
QUIETLY = settings(
    max_examples=CASES // (1 + MUTANTS),
    deadline=None,
    derandomize=CASES < 1000,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

texts = st.text(max_size=12) | st.sampled_from(
    ["question_id", "\ud800", "\0", "\u2028", "1e999", "../../x", "NaN", "vanilla", "\x1b[2J"]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -1, 0, 1, 2**63])
    | st.floats()
    | texts
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


def near(example: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return objects that differ from a good one in a few keys: what is almost right finds more."""
    changes = st.dictionaries(st.sampled_from(sorted(example)) | texts, values, max_size=3)
    dropped = st.sets(st.sampled_from(sorted(example)), max_size=1)
    return st.builds(
        lambda new, without: {
            key: value for key, value in (example | new).items() if key not in without
        },
        changes,
        dropped,
    )


def json_files(example: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Return files of lines that are almost right, and bytes that are not."""
    lines = st.lists((near(example) | values).map(json.dumps), max_size=3).map("\n".join)
    deep = st.integers(1, 5000).map(lambda depth: "[" * depth + "]" * depth)
    twice = st.just('{"question_id": 1, "question_id": 2}')
    whole = (lines | deep | twice).map(str.encode)
    cut = st.builds(lambda text, end: text[:end], whole, st.integers(0, 200))
    return whole | cut | st.binary(max_size=60)


QUESTION = {"question_id": 1, "category": "qa", "turns": ["Who?"]}
CHOICE = {
    **{"index": 0, "turns": ["I."], "new_tokens": [2], "wall_time": [0.5]},
    **{"accept_lengths": [2], "token_ids": [[3, 4]]},
}
ANSWER = {"question_id": 1, "category": "qa", "choices": [CHOICE], "model_id": "m"}
TEMPLATE = {"paths": [[0], [1], [0, 0]]}


def is_one_line(read: Callable[[], object]) -> bool:
    """Say whether something was read; what is refused must be refused in one line."""
    try:
        read()
    except (UserError, ValueError) as error:
        assert str(error).strip(), "an error without a word"
        line = " ".join(str(error).splitlines())
        assert len(line) < 2000, "an error longer than anybody reads"
        return False
    return True


def mutants(content: bytes, seed: int) -> Iterator[bytes]:
    """Yield a file, and files in which a piece of it is cut, doubled or written over."""
    yield content
    draw = random.Random(seed)
    for _ in range(MUTANTS):
        begin, end = sorted(draw.choices(range(len(content) + 1), k=2))
        junk = draw.choice(
            (b"", content[begin:end] * 2, draw.randbytes(3), b"\0", b"\\ud800", b"{")
        )
        yield content[:begin] + junk + content[end:]


seeds = st.integers(0, 2**32)


@QUIETLY
@given(json_files(QUESTION), seeds)
def test_questions(tmp_path: Path, content: bytes, seed: int) -> None:
    file = tmp_path / "q.jsonl"
    for mutant in mutants(content, seed):
        file.write_bytes(mutant)
        if is_one_line(lambda: load_questions(file)):
            for question in load_questions(file):
                "".join(question.turns).encode()  # text that a tokenizer takes


@QUIETLY
@given(json_files(ANSWER), seeds)
def test_answers(tmp_path: Path, content: bytes, seed: int) -> None:
    file = tmp_path / "a.jsonl"
    for mutant in mutants(content, seed):
        file.write_bytes(mutant)
        is_one_line(lambda: [row.is_failed for row in read_answers(file)])


@QUIETLY
@given(json_files({"options": {}, "model_id": "m"}), seeds)
def test_sidecars(tmp_path: Path, content: bytes, seed: int) -> None:
    for mutant in mutants(content, seed):
        (tmp_path / "a.meta.json").write_bytes(mutant)
        is_one_line(lambda: RunRecord.read(tmp_path / "a.jsonl"))


@QUIETLY
@given(json_files(TEMPLATE), seeds)
def test_templates(tmp_path: Path, content: bytes, seed: int) -> None:
    file = tmp_path / "t.json"
    for mutant in mutants(content, seed):
        file.write_bytes(mutant)
        is_one_line(lambda: load_template(str(file)))


def matrices() -> st.SearchStrategy[bytes]:
    """Return safetensors files that are almost right: a header that lies about its bytes."""
    entry = near({"dtype": "I32", "shape": [VOCAB, 8], "data_offsets": [0, 4 * VOCAB * 8]})
    header = st.dictionaries(st.just("adjacency") | texts, entry, max_size=2).map(
        lambda tensors: json.dumps(tensors).encode()
    )
    length = st.just(None) | st.integers(0, 2**64 - 1)
    body = st.binary(max_size=8) | st.just(bytes(4 * VOCAB * 8))
    return st.binary(max_size=40) | st.builds(
        lambda head, size, data: (
            (len(head) if size is None else size).to_bytes(8, "little") + head + data
        ),
        header,
        length,
        body,
    )


@QUIETLY
@given(matrices(), seeds)
def test_matrices(tmp_path: Path, content: bytes, seed: int) -> None:
    file = tmp_path / "m.safetensors"
    config, cpu = drafter_class("recycling").config_class(), torch.device("cpu")
    for mutant in mutants(content, seed):
        file.write_bytes(mutant)
        is_one_line(
            lambda: make_drafter(
                find_method("recycling"), config, VOCAB, cpu, read_memory(str(file))
            )
        )


@QUIETLY
@given(st.sampled_from(sorted(PUBLISHED_DIR.glob("*.csv"))), seeds)
def test_published_tables(tmp_path: Path, changed: Path, seed: int) -> None:
    for file in PUBLISHED_DIR.glob("*.csv"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for mutant in mutants(changed.read_bytes(), seed):
        (tmp_path / changed.name).write_bytes(mutant)
        is_one_line(lambda: read_published(tmp_path, ["A100"]))


@QUIETLY
@given(texts, texts)
def test_names_stay_in_their_folder(model_id: str, shard: str) -> None:
    def read() -> None:
        answers, _ = AnswerOptions(model_id=model_id), QuestionOptions(shard=shard)
        file = Path("data/demo/model_answer") / f"{answers.model_id}.jsonl"
        assert Path(os.path.normpath(file)).parent == Path("data/demo/model_answer")

    is_one_line(read)


def test_the_cases_are_no_weak_test(tmp_path: Path) -> None:
    file = tmp_path / "f"
    for example, read in ((QUESTION, load_questions), (ANSWER, read_answers)):
        file.write_text(json.dumps(example))
        assert is_one_line(lambda: read(file)), "the example that is changed must be good"  # noqa: B023
        file.write_text("{")
        assert not is_one_line(lambda: read(file))  # noqa: B023
    with pytest.raises(RuntimeError):
        is_one_line(lambda: (_ for _ in ()).throw(RuntimeError("a traceback")))
