"""Options that change which tokens are chosen, what ends an answer and what is asked.

Run: pytest tests/evaluation/inference/test_decoding_options.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluation import compare
from evaluation.inference import run as running
from evaluation.inference.config import DecodingOptions
from evaluation.inference.method import rule_of
from evaluation.questions.conversation import choose_conversation
from evaluation.questions.questions import load_questions
from model.commands.command_line import UserError
from tests.evaluation.conftest import error_line, read_meta, read_rows, run, token_ids, write_rows

METHODS = ("vanilla", "recycling", "hybrid", "generate")
SYSTEM = "Answer like a pirate."
QUESTIONS = [
    {"question_id": 1, "category": "qa", "turns": ["Who are you?", "And who am I?"]},
    {"question_id": 2, "category": "qa", "turns": ["Name three rivers."]},
    {"question_id": 3, "category": "qa", "turns": ["How far is the moon?"]},
    {"question_id": 4, "category": "qa", "turns": ["Where is Rome?"]},
]


@pytest.fixture
def asked(tiny_model: Path, tmp_path: Path) -> list[str]:
    """Options of a short run over questions of one's own."""
    file = write_rows(tmp_path / "question.jsonl", QUESTIONS)
    short = "--threads 1 --warmup 0 --max-new-tokens 16"
    return ["--model-path", str(tiny_model), "--question-file", str(file), *short.split()]


@pytest.fixture
def plain(asked: list[str], tmp_path: Path) -> Path:
    """The answers without any of the options."""
    file = tmp_path / "plain.jsonl"
    assert run("vanilla", asked, file) == 0
    return file


def compared(given: list[str], folder: Path, size: int) -> list[Path]:
    """Compare METHODS; return the answer files."""
    words = ["--in-order", "--out", str(folder), "--batch-size", str(size), "--methods", *METHODS]
    assert compare.main([*given, *words]) == 0
    files = sorted(folder.glob("*.jsonl"))
    assert len(files) == len(METHODS) + 1
    return files


def stop_in(file: Path) -> str:
    """Return four letters from the middle of the first answer."""
    text: str = read_rows(file)[0]["choices"][0]["turns"][0]
    return text[len(text) // 2 : len(text) // 2 + 4]


def generated(given: list[str], **settings: Any) -> list[int]:
    """Return the tokens that transformers' own `generate` answers to the second question."""
    tokenizer = AutoTokenizer.from_pretrained(given[1])
    model = AutoModelForCausalLM.from_pretrained(given[1], dtype=torch.float32)
    system = settings.pop("system", None)
    question = load_questions(Path(given[3]))[1]
    ids = choose_conversation("tokenizer", given[1], tokenizer).prompt_ids(
        [], question.turns[0], system
    )
    inputs = torch.tensor([ids])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=16,
        tokenizer=tokenizer,
        **settings,
    )
    return output[0, len(ids) :].tolist()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", ["repetition_penalty", "stop_strings", "system"])
def test_methods_and_generate_answer_alike(
    name: str, size: int, asked: list[str], plain: Path, tmp_path: Path
) -> None:
    stop = stop_in(plain)
    words, value = {
        "repetition_penalty": (["--repetition-penalty", "1.5"], 1.5),
        "stop_strings": (["--stop", "no such text", stop], ["no such text", stop]),
        "system": (["--system-prompt", SYSTEM], SYSTEM),
    }[name]
    files = compared([*asked, *words], tmp_path / "compared", size)
    expected = token_ids(files[0])
    assert expected != token_ids(plain), "the option changed nothing"
    for file in files:
        assert token_ids(file) == expected, file
    assert expected[2][0][0][0] == generated(asked, **{name: value})
    meta = read_meta(files[0])
    assert meta[words[0].removeprefix("--").replace("-", "_")] == value


def test_a_stop_ends_the_text_after_its_token(
    asked: list[str], plain: Path, tmp_path: Path
) -> None:
    stop, file = stop_in(plain), tmp_path / "stopped.jsonl"
    assert run("recycling", asked, file, "--stop", stop) == 0
    (choice,) = read_rows(file)[0]["choices"]
    assert stop in choice["turns"][0] and choice["stop_reasons"][0] == "criteria"
    tokens, whole = token_ids(file)[1][0][0][0], token_ids(plain)[1][0][0][0]
    assert len(tokens) < len(whole) and whole[: len(tokens)] == tokens


def test_a_question_s_own_system_prompt_comes_first(
    asked: list[str], plain: Path, tmp_path: Path
) -> None:
    rows = [dict(row) for row in QUESTIONS]
    rows[0]["system"], rows[1]["system"] = SYSTEM, None
    own = write_rows(tmp_path / "own.jsonl", rows)
    given = [str(own) if word.endswith("question.jsonl") else word for word in asked]
    files = {name: tmp_path / f"answers-{name}.jsonl" for name in ("own", "both", "all")}
    assert run("vanilla", given, files["own"]) == 0
    assert run("vanilla", given, files["both"], "--system-prompt", "Be brief.") == 0
    assert run("vanilla", asked, files["all"], "--system-prompt", SYSTEM) == 0
    found = {
        name: {row["question_id"]: row["choices"][0]["prompt_tokens"][0] for row in read_rows(file)}
        for name, file in {**files, "plain": plain}.items()
    }
    assert found["own"][1] == found["both"][1] == found["all"][1] > found["plain"][1]
    assert found["own"][2] == found["plain"][2] < found["both"][2] < found["all"][2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--min-p 0.1", "min_p: needs sampling"),
        ("--temperature 1 --min-p 1.5", "min_p: got 1.5; allowed: 0 to 1"),
        ("--repetition-penalty 0", "repetition_penalty: got 0.0; allowed: above 0"),
        ("--repetition-penalty nan", "repetition_penalty: got nan"),
        (
            "--system-prompt x --conv-template yuan",
            "system_prompt: yuan, the template for .* leaves",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    words: str, says: str, asked: list[str], no_weights: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(says, error_line("vanilla", [*asked, *words.split()], capsys))


@pytest.mark.parametrize(
    ("methods", "words", "says"),
    [
        ("generate-pld", "--stop x", "stop: got 'x' with generate-pld"),
        ("generate-batch", "--batch-size 2 --stop x", "stop: got 'x' with generate-batch"),
        ("generate-batch", "--batch-size 2 --repetition-penalty 2", "repetition_penalty: got 2.0"),
    ],
)
def test_referees_refuse_what_transformers_does_not_do(
    methods: str, words: str, says: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "load_target", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(UserError, match=says):
        compare.main([*asked, *words.split(), "--methods", "vanilla", methods])


def test_prompt_lookup_of_transformers_honours_the_penalty(
    asked: list[str], tmp_path: Path
) -> None:
    words = ["--repetition-penalty", "1.3", "--methods", "vanilla", "generate-pld"]
    assert compare.main([*asked, "--out", str(tmp_path / "pld"), *words]) == 0
    one, *others = [token_ids(file) for file in (tmp_path / "pld").glob("*.jsonl")]
    assert all(other == one for other in others)


def test_draws_leave_out_what_min_p_does() -> None:
    logits = torch.tensor([0.0, 1.0, 3.0, 2.9])
    rule = rule_of(DecodingOptions(temperature=2.0, min_p=0.9), torch.Generator().manual_seed(1))
    assert rule is not None
    assert {rule.choose(logits, [0]) for _ in range(50)} == {2, 3}


@pytest.mark.parametrize("method", ["recycling", "hybrid"])
def test_draws_are_plain_decoding_s_with_all_of_them(
    method: str, asked: list[str], tmp_path: Path
) -> None:
    words = [
        "--temperature",
        "0.8",
        "--min-p",
        "0.02",
        "--top-k",
        "20",
        "--repetition-penalty",
        "1.2",
        "--seed",
        "5",
    ]
    files = [tmp_path / f"{name}.jsonl" for name in ("vanilla", method)]
    for name, file in zip(("vanilla", method), files, strict=True):
        assert run(name, asked, file, *words) == 0
    assert token_ids(files[0]) == token_ids(files[1])
