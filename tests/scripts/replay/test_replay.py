"""A replay gives the acceptance lengths of a live run, for every method, without the model.

Run: pytest tests/scripts/replay/test_replay.py
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from model.backends.target import TargetModel
from model.commands.command_line import UserError
from model.commands.model_options import ModelOptions
from model.engine.loop import generate
from model.methods import METHODS, drafter_class
from scripts.replay import __main__ as command
from scripts.replay.__main__ import build_parser, main, record
from scripts.replay.recording import Recording
from scripts.replay.scores import TurnScore, check_replayable, drafter_from, figures, score
from scripts.replay.target import ReplayTarget, refuse_unrecordable
from tests.model.decoded import datastore_file
from tests.model.families.family import Family

TOP_K = 12  # tokens of a row that are recorded
VOCAB = 8192


def replayable(method: str) -> str:
    """Return a method with a draft model or a datastore, and with trees that are the same in each run and
    read no more tokens of a row than are recorded.
    """
    cls = drafter_class(method)
    if cls.drafts_with() == "draft_model":
        return f"{method} --draft-model {ModelOptions().model_path}"
    if cls.drafts_with() == "datastore":
        return f"{method} --datastore {datastore_file(VOCAB)}"
    config = cls.config_class()
    if getattr(config, "budget", "") == "auto":
        return f"{method} --budget fixed --num-nodes 12"
    needs = cls(config, VOCAB, torch.device("cpu")).needs
    return f"{method} --num-nodes 7" if needs.num_candidates > TOP_K else method


DRAFTERS = [
    *(
        replayable(method)
        for method in METHODS
        # States, which heads read, and masks are not recorded.
        if drafter_class(method).drafts_with() != "heads" and method != "esp"
    ),
    "recycling-averaged --start cold",
    "pld --match latest --num-pred-tokens 4",
    "samd --fallback none",
]
LIMIT = 20


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """A second thread costs more than it brings."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TargetModel]:
    """A recording of two demo questions that has served every drafter, and its model."""
    file = tmp_path_factory.mktemp("replay") / "demo.replay"
    words = f"record --out {file} --num-questions 2 --max-new-tokens {LIMIT} --top-k {TOP_K}"
    recording, target = record(build_parser().parse_args(words.split()))
    for drafter in DRAFTERS:
        replayed(recording, drafter, target)
    recording.save(file)
    return file, target


def replayed(recording: Recording, words: str, target: TargetModel | None) -> list[TurnScore]:
    """Return a drafter's scores on a recording."""
    drafter = drafter_from(words, recording.source.vocab_size)
    return score(ReplayTarget(recording, target), drafter, recording.turns)


def live(recording: Recording, words: str, target: TargetModel) -> list[list[int]]:
    """Return the acceptance lengths of a drafter on the model itself."""
    drafter = drafter_from(words, target.vocab_size)
    lengths, last = [], None
    for turn in recording.turns:
        if drafter.needs.cold_start and turn.question_id != last:
            drafter.reset()
        last = turn.question_id
        answer = generate(
            target,
            drafter,
            turn.prompt_ids,
            max_new_tokens=LIMIT,
            eos_ids=recording.source.eos_ids,
        )
        assert tuple(answer.token_ids) == turn.answer_ids
        lengths.append(answer.accept_lengths)
    return lengths


@pytest.mark.parametrize("words", DRAFTERS, ids=lambda words: words.partition(" /")[0])
def test_lengths_equal_those_of_a_live_run(words: str, recorded: tuple[Path, TargetModel]) -> None:
    file, target = recorded
    scores = replayed(Recording.load(file), words, target=None)
    expected = live(Recording.load(file), words, target)
    assert [list(turn.accept_lengths) for turn in scores] == expected
    # A datastore of random tokens says nothing that a model would say.
    if not words.startswith(("vanilla", "rest")):
        assert max(max(lengths) for lengths in expected) > 1, "no draft was accepted"


def test_drafters_are_told_apart(recorded: tuple[Path, TargetModel]) -> None:
    recording = Recording.load(recorded[0])
    found = {words: figures(replayed(recording, words, target=None)) for words in DRAFTERS}
    assert found["vanilla"] == (1.0, 1.0, 1.0)
    assert found["recycling"].nodes == 81.0
    assert found["recycling"].mat > found["vanilla"].mat
    assert len({figure.mat for figure in found.values()}) > 3


def test_a_drafter_that_asks_for_something_new_needs_the_model(
    recorded: tuple[Path, TargetModel],
) -> None:
    file, target = recorded
    recording = Recording.load(file)
    new = "lookahead --window 12 --level 3"
    with pytest.raises(UserError, match=r"not in the recording; add --extend to ask the model"):
        replayed(recording, new, target=None)
    num_texts = recording.num_texts
    scores = replayed(recording, new, target)
    assert recording.num_texts > num_texts
    assert [list(turn.accept_lengths) for turn in scores] == live(recording, new, target)
    assert replayed(recording, new, target=None) == scores


def test_what_is_saved_is_loaded(recorded: tuple[Path, TargetModel], tmp_path: Path) -> None:
    file, _ = recorded
    recording, again = Recording.load(file), tmp_path / "again.replay"
    recording.save(again)
    first, second = load_file(file), load_file(again)
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)
    loaded = Recording.load(again)
    assert loaded.source == recording.source and loaded.turns == recording.turns
    of_a_text = 8 + sum(first[name][0].nbytes for name in ("ids", "logits", "probes"))
    num_bytes = recording.num_texts * of_a_text
    assert abs(file.stat().st_size - num_bytes) < 0.05 * num_bytes + 9000


def test_a_wrong_row_is_noticed(recorded: tuple[Path, TargetModel]) -> None:
    file, target = recorded
    recording = Recording.load(file)
    turn = recording.turns[0]
    node = 0
    for token in turn.prompt_ids:
        node = recording.child(node, token)
    ids = recording._rows["ids"]
    ids[node] = ids[node][::-1]
    with pytest.raises(RuntimeError, match="changes the text"):
        replayed(recording, "vanilla", target)


def test_steps_that_begin_after_a_loop_is_seen_are_counted_apart(
    recorded: tuple[Path, TargetModel],
) -> None:
    turn = Recording.load(recorded[0]).turns[0]
    looping = replace(turn, answer_ids=(*range(100, 110), *[7, 8] * 20))
    # 24 tokens of the loop are in after 34 tokens; the loop is seen a little before.
    straight = replace(turn, answer_ids=tuple(range(100, 150)))
    lengths = (10, 12, 14, 7, 7)
    nodes = (5,) * 5
    assert TurnScore(looping, lengths, nodes).num_steps_before_loop == 3
    assert TurnScore(straight, lengths, nodes).num_steps_before_loop == 5
    found = figures([TurnScore(looping, lengths, nodes)])
    assert found == (10.0, 12.0, 5.0)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("recyling", "did you mean recycling"),
        ("", "methods: got ''"),
        ("recycling --output-id-topk 13", "asks for 13 tokens of a row; the recording holds 12"),
        ("recycling --tree-version auto", "depend on times .*; give a tree template as --tree-v"),
        ("samd --tree-version auto", "depend on times .*; give a tree template as --tree-version"),
        (
            "hybrid --num-nodes 16",
            "its trees depend on times measured on this device; give --budget fixed",
        ),
        ("recycling --output-id-topk 2", "uses rank"),
    ],
)
def test_drafters_that_cannot_be_replayed_are_one_line(words: str, text: str) -> None:
    with pytest.raises(UserError, match=text) as error:
        check_replayable(drafter_from(words, 100), words, top_k=12)
    assert "\n" not in str(error.value)


def test_the_drafters_of_the_examples_can_be_replayed() -> None:
    text = (command.__doc__ or "").replace("\\\n", " ")
    lists = [line.split("--drafters")[1] for line in text.splitlines() if "--drafters" in line]
    drafters = [words for one in lists for words in shlex.split(one, comments=True)]
    assert len(drafters) > 3
    for words in drafters:
        check_replayable(drafter_from(words, 100), words, top_k=32)


@pytest.mark.parametrize("content", [None, b"", b"no tensors", "other tensors"])
def test_files_that_are_no_recording_are_one_line(content: object, tmp_path: Path) -> None:
    file = tmp_path / "some.replay"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content:
        save_file({"a": np.zeros(2)}, file)
    with pytest.raises(UserError, match=r"cannot be read|is not a recording") as error:
        main(["run", str(file), "--drafters", "pld"])
    assert "\n" not in str(error.value)


def test_models_that_change_along_the_text_are_refused() -> None:
    options = {
        "floor_scale": 32,
        "attn_temperature_tuning": True,
        "num_experts_per_tok": 1,
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
    }
    target = TargetModel(Family("scaled", "Llama4TextConfig", options).build())
    refuse_unrecordable(target, 20)
    with pytest.raises(UserError, match="in a part of the text only"):
        refuse_unrecordable(target, 100)


def test_the_command_records_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "short.replay"
    questions = tmp_path / "questions.jsonl"
    row = {"question_id": 1, "category": "qa", "turns": ["What is a harbor?", "Why?"]}
    questions.write_text(json.dumps(row))
    given = f"--question-file {questions} --max-new-tokens 8 --top-k 8"
    assert main(["record", "--out", str(file), *given.split()]) == 0
    assert "2 turns:" in capsys.readouterr().out
    for more in ("--temperature 1", "--load-matrix no/file", "--max-new-tokens 3"):
        with pytest.raises(
            UserError, match="allowed: options of recycling itself, without a saved"
        ):
            main(["run", str(file), "--extend", "--drafters", f"recycling {more}"])
    with pytest.raises(UserError, match="add --extend"):
        main(["run", str(file), "--drafters", "recycling"])
    outputs: list[Sequence[str]] = []
    for extend in (["--extend"], []):
        assert main(["run", str(file), "--drafters", "recycling", "pld", *extend]) == 0
        outputs.append(capsys.readouterr().out.splitlines())
    assert json.loads(outputs[0][-1]) == json.loads(outputs[1][-1])
    assert any("texts added" in line for line in outputs[0])
    assert not any("texts added" in line for line in outputs[1])


def test_the_questions_are_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question_id": 1, "category": "qa", "turns": ["Why?"]}')
    with pytest.raises(UserError, match="one of the files to read; give another file"):
        main(["record", "--question-file", str(file), "--out", str(file)])
    assert file.read_text().startswith('{"question_id": 1')
