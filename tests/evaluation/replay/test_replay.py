"""A replay gives the acceptance lengths of a live run, for every method, without the model.

Run: pytest tests/evaluation/replay
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evaluation.leaderboard import main as leaderboard
from evaluation.record import METHODS as RECORDED
from evaluation.record import main as record
from evaluation.replay.__main__ import main, replay
from evaluation.replay.costs import StepCosts
from evaluation.replay.replaying import replayable
from evaluation.replay.target import ReplayTarget, refuse_unrecordable
from evaluation.replay.trace import (
    NUM_KEPT,
    SUFFIX,
    RecordedQuestion,
    Row,
    Source,
    questions_of,
    whole,
)
from model.backends.target import TargetModel
from model.commands.command_line import UserError
from model.commands.loading import check_model, load_target, make_drafter
from model.commands.model_options import ModelOptions
from model.engine.loop import generate
from model.kernels.linear import MOST_ROWS_WITH_VECTORS
from model.methods import METHODS, drafter_class
from tests.model.decoded import datastore_file
from tests.model.families.family import Family

VOCAB = 8192
LIMIT = 20
COSTS = StepCosts(
    *("some-machine", {"device": "cpu", "machine": "2 cores", "threads": 2}),
    *((256, 1280), (1, 8, 64, 128), (10.0, 11.0, 30.0, 60.0), (12.0, 13.0, 36.0, 70.0)),
    *({"16": 20.0, "128": 100.0}, 0.5, (1.0, 2.0), 0.03),
)


def fixed(method: str) -> str:
    """Return a method with what it drafts with, and with trees that do not depend on times."""
    cls = drafter_class(method)
    if cls.drafts_with() == "draft_model":
        return f"{method} --draft-model {ModelOptions().model_path}"
    if cls.drafts_with() == "datastore":
        return f"{method} --datastore {datastore_file(VOCAB)}"
    is_auto = getattr(cls.config_class(), "budget", "") == "auto"
    return f"{method} --budget fixed --num-nodes 12" if is_auto else method


# Heads and adapld read states, esp appends masks: these are not recorded.
OTHERS = [
    *(
        fixed(name)
        for name in METHODS
        if drafter_class(name).drafts_with() != "heads" and name not in ("esp", "adapld")
    ),
    *("recycling-averaged --start cold", "pld --match latest --num-pred-tokens 4"),
]
DRAFTERS = list(dict.fromkeys([*RECORDED, *OTHERS]))
# Drafts of these learn from accepted tokens alone.
LEARN_FROM_ACCEPTED = ("pld", "suffix", "cacheback", "logitspec", "vanilla")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """A second thread costs more than it brings."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of two demo questions that serves every method."""
    folder = tmp_path_factory.mktemp("traces") / "demo"
    given = ["--num-questions", "2", "--max-new-tokens", str(LIMIT), "--threads", "1"]
    assert (
        record([ModelOptions().model_path, "--out", str(folder), *given, "--methods", *DRAFTERS])
        == 0
    )
    return folder


@pytest.fixture(scope="module")
def target() -> TargetModel:
    options = ModelOptions()
    return load_target(options, check_model(options))


def questions(folder: Path) -> list[RecordedQuestion]:
    return list(questions_of(folder / f"demo{SUFFIX}"))


def live(folder: Path, words: str, target: TargetModel) -> list[int]:
    """Return the acceptance lengths of a method on the model itself."""
    participant, source = replayable(words), Source.read(folder)
    drafter = make_drafter(
        participant.method,
        participant.config,
        target.vocab_size,
        target.device,
        {},  # type: ignore[arg-type]
    )
    lengths: list[int] = []
    for question in questions(folder):
        if drafter.needs.cold_start:
            drafter.reset()
        for turn in question.turns:
            answer = generate(
                *(target, drafter, turn.prompt_ids), max_new_tokens=LIMIT, eos_ids=source.eos_ids
            )
            assert answer.token_ids == turn.answer_ids
            lengths += answer.accept_lengths
    return lengths


def replayed(folder: Path, words: str) -> Any:
    (counts,) = replay([folder], [words], None, None)[words].values()
    return counts


@pytest.mark.parametrize("words", DRAFTERS, ids=lambda words: words.partition(" /")[0])
def test_lengths_equal_those_of_a_live_run(words: str, trace: Path, target: TargetModel) -> None:
    counts, expected = replayed(trace, words), live(trace, words, target)
    assert counts.accept_lengths == expected
    assert counts.unrecorded_steps == 0
    # A datastore of random tokens says nothing that a model would say.
    if not words.startswith(("vanilla", "rest")):
        assert max(expected) > 1, "no draft was accepted"


def test_what_learns_from_accepted_tokens_needs_no_recording(
    tmp_path: Path, target: TargetModel
) -> None:
    folder = tmp_path / "plain"
    given = ["--num-questions", "2", "--max-new-tokens", str(LIMIT), "--methods", "vanilla"]
    assert record([ModelOptions().model_path, "--out", str(folder), *given]) == 0
    for words in LEARN_FROM_ACCEPTED:
        assert replayed(folder, words).accept_lengths == live(folder, words, target)
    counts = replayed(folder, "recycling")  # its rejected nodes are other texts' rows, and counted
    assert 0 < counts.unrecorded_steps <= counts.steps
    assert counts.mat > 1


def test_a_recording_goes_on_where_it_stopped(trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(trace, folder)
    file = folder / f"demo{SUFFIX}"
    whole = file.read_bytes()
    first = 8 + int.from_bytes(whole[:8], "little")
    file.write_bytes(whole[: first + 100])  # the second question was half written
    given = ["--num-questions", "2", "--max-new-tokens", str(LIMIT), "--threads", "1"]
    command = [ModelOptions().model_path, "--out", str(folder), *given, "--methods"]
    assert record([*command, *DRAFTERS]) == 0
    assert file.read_bytes() == whole
    with pytest.raises(UserError, match=r"has a trace with methods .*; give another folder"):
        record([*command, "recycling"])


def test_a_recording_reads_prompts_and_drafts_apart_as_a_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over more rows than this kernel takes has other bits: no draft may share the prompt's."""
    file, folder, sizes = tmp_path / "long.jsonl", tmp_path / "long", set[int]()
    words = " ".join(f"word {number}" for number in range(60))
    question = {"question_id": 1, "category": "qa", "turns": [words, "And then?"]}
    file.write_text(json.dumps(question) + "\n")
    run = TargetModel.run

    def noted(self: TargetModel, token_ids: torch.Tensor, *given: Any, **options: Any) -> Any:
        sizes.add(len(token_ids))
        return run(self, token_ids, *given, **options)

    monkeypatch.setattr(TargetModel, "run", noted)
    given = ["--question-file", str(file), "--max-new-tokens", "6", "--out", str(folder)]
    methods = ["recycling-averaged", "suffix"]
    record([ModelOptions().model_path, *given, "--methods", *methods])
    prompts = {len(turn.prompt_ids) - 1 for turn in questions(folder)[0].turns}
    assert min(prompts) > MOST_ROWS_WITH_VECTORS
    assert {size for size in sizes if size > MOST_ROWS_WITH_VECTORS} == prompts


def test_a_trace_says_its_methods_and_its_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, methods = tmp_path / "raw", ["pld --num-pred-tokens 3", "suffix"]
    given = ["--num-questions", "1", "--max-new-tokens", "6", "--conv-template", "raw"]
    record([ModelOptions().model_path, "--out", str(folder), *given, "--methods", *methods])
    assert Source.read(folder).conv_template == "raw"
    capsys.readouterr()
    assert main([str(folder)]) == 0
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert [row.split("|")[1].strip() for row in rows] == methods


def test_answer_files_are_reported_as_replayed(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs, out = tmp_path / "some-machine.json", tmp_path / "out"
    COSTS.write(costs)
    words = ["recycling", "hybrid", "pld-auto"]
    given = ["--methods", *words, "--costs", str(costs), "--out", str(out)]
    assert main([str(trace), *given]) == 0
    _, _, header, _, *rows = capsys.readouterr().out.splitlines()
    assert "demo: demo questions" in header
    assert [row.split()[1] for row in rows] == ["vanilla", *words]
    assert "1.00, 1.00x" in rows[0]
    assert leaderboard([str(out)]) == 0
    page = capsys.readouterr().out
    assert "replayed, times predicted by some-machine" in page
    assert "Hybrid" in page and "cannot be" not in page and "its run" not in page


def test_times_follow_the_costs() -> None:
    assert COSTS.of_pass(1, 256) == 10.0 and COSTS.of_pass(1, 1280) == 12.0
    assert COSTS.of_pass(36, 256) == pytest.approx(20.5)
    assert COSTS.of_pass(256, 256) == pytest.approx(120.0)
    assert COSTS.of_pass(1, 768) == pytest.approx(11.0)
    assert COSTS.of_prompt(16) == 20.0 and COSTS.of_prompt(240) == pytest.approx(180.0)
    assert COSTS.model().sizes == (1, 8, 64)


def test_what_is_packed_is_unpacked() -> None:
    generator = np.random.default_rng(0)
    question = RecordedQuestion("a", "qa", 64)
    node = 0
    for index in range(1500):
        width = (1, 8, NUM_KEPT, 65)[index % 4]
        logits = np.sort(generator.normal(0, 900, width))[::-1]
        samples = whole(generator.normal(0, 60, 64), 1, 127).astype(np.int8)
        row = Row(
            generator.integers(0, 10**5, width).astype(np.int32),
            whole(logits, 16, 2000).astype(np.int16),
            samples if index % 3 else None,
        )
        node = question.add(node if index % 5 else 0, index % 700, row)
    again, nodes = RecordedQuestion.unpack(question.pack()), range(1, question.num_texts + 1)
    for count in (1, 8, 65):
        assert again.rows(nodes, count) == question.rows(nodes, count)
    assert np.array_equal(again.samples(nodes), question.samples(nodes))
    for one in nodes:
        assert again.path_to(one) == question.path_to(one)
        assert again.width(one) == question.width(one)
        assert again.lacks(one, 1, True) == question.lacks(one, 1, True)
    found = whole(np.array([np.nan, np.inf, -np.inf, 0.04]), 16, 2000)
    assert found.tolist() == [0, 32000, -32000, 1]


def test_a_row_has_what_two_methods_asked_for() -> None:
    question = RecordedQuestion("a", "qa", 2)
    ids, logits = np.array([5, 6, 7], np.int32), np.array([48, 32, 16], np.int16)
    node = question.add(0, 9, Row(ids[:1], logits[:1], None))
    assert not question.lacks(node, 1, False) and question.lacks(node, 2, False)
    question.add(0, 9, Row(ids[:1], logits[:1], np.array([3, -4], np.int8)))
    assert question.add(0, 9, Row(ids, logits, None)) == node and question.num_texts == 1
    assert not question.lacks(node, 3, True)
    assert question.rows([node], 4) == ([[5, 6, 7, 0]], [[3.0, 2.0, 1.0, -2000.0]])
    assert question.samples([node]).tolist() == [[3.0, -4.0]]


def test_a_method_sees_no_more_of_a_prompt_s_row_than_when_it_was_recorded(trace: Path) -> None:
    """A later method may ask for tokens whose logits tie with the last one that an earlier method read."""
    target, question = ReplayTarget(Source.read(trace)), RecordedQuestion("a", "qa", 2)
    target.question, target.num_read = question, 2
    ids, logits = np.array([5, 6, 7], np.int32), np.array([48, 32, 32], np.int16)
    found = []
    for count in (2, 3):
        node = question.add(0, 9, Row(ids[:count], logits[:count], None))
        found.append(target._dense([node]))
    assert torch.equal(*found) and found[0].topk(2).indices.tolist() == [[5, 6]]


def test_a_prompt_is_shown_in_the_chunks_of_a_run(trace: Path) -> None:
    """Rows of a chunk that end with the same token are averaged together."""
    target, question = ReplayTarget(Source.read(trace)), RecordedQuestion("a", "qa", 2)
    target.question, target.vocab_size = question, 2**16
    node, prompt = 0, list(range(300))
    for token in prompt:
        row = Row(np.array([5], np.int32), np.array([48], np.int16), None)
        node = question.add(node, token, row)
    chunks = target.prefill([*prompt, 0], target.new_cache(400), with_logits=True)
    assert [chunk.token_ids for chunk in chunks] == [prompt]


def doctored(folder: Path, change: Any) -> None:
    """Change every row of the first question of a trace."""
    file = folder / f"demo{SUFFIX}"
    first, *others = questions(folder)
    change(first)
    blocks = [question.pack() for question in (first, *others)]
    file.write_bytes(b"".join(len(block).to_bytes(8, "little") + block for block in blocks))


def test_the_check_finds_doctored_rows(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(trace, folder)
    command = [ModelOptions().model_path, "--check", str(folder), "--sample", "60"]
    assert record(command) == 0
    assert "0 of 60 texts have another row" in capsys.readouterr().out

    def swap(question: RecordedQuestion) -> None:
        question._logits[:, 0] += 40

    doctored(folder, swap)
    assert record(command) == 1
    assert "a logit differs by" in capsys.readouterr().out


def test_a_trace_that_does_not_give_its_answers_is_noticed(trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(trace, folder)

    def reverse(question: RecordedQuestion) -> None:
        question._token_ids += 1

    doctored(folder, reverse)
    with pytest.raises(UserError, match="gets another answer than is recorded"):
        replayed(folder, "vanilla")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("recyling", "did you mean recycling"),
        ("recycling --output-id-topk 66", "asks for 66 tokens of a row; the trace holds 65"),
        ("recycling --tree-version auto", "by what a step costs; give --costs FILE, or a fixed"),
        ("hybrid --num-nodes 16", "by what a step costs; give --costs FILE, or a fixed number"),
        ("esp", "needs masks of its own, as no trace has"),
        ("recycling --temperature 1", "allowed: options of recycling itself, without a saved"),
    ],
)
def test_methods_that_cannot_be_replayed_are_one_line(words: str, text: str, trace: Path) -> None:
    with pytest.raises(UserError, match=text) as error:
        main([str(trace), "--methods", words])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--methods", "pld", "--out", "x"], "out: got it without --costs"),
        (["--methods", "pld", "--costs", "nowhere.json"], "costs nowhere.json: cannot be read"),
        (["--methods", "pld", "--costs", "pyproject.toml"], "is not JSON"),
    ],
)
def test_wrong_options_are_one_line(given: Sequence[str], text: str, trace: Path) -> None:
    with pytest.raises(UserError, match=text) as error:
        main([str(trace), *given])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, b"", b"no trace", b"{}", b'{"format": "trace-0"}'])
def test_folders_that_are_no_trace_are_one_line(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "trace.json").write_bytes(content)
    with pytest.raises(UserError, match=r"trace .*: (cannot be read|is not|is of format)") as error:
        main([str(tmp_path), "--methods", "pld"])
    assert "\n" not in str(error.value)


def test_damaged_blocks_are_one_line(trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(trace, folder)
    file = folder / f"demo{SUFFIX}"
    content = bytearray(file.read_bytes())
    content[200:240] = bytes(40)
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"a question cannot be read: .*; run the command") as error:
        main([str(folder), "--methods", "pld"])
    assert "\n" not in str(error.value)


def test_something_must_be_asked_for() -> None:
    with pytest.raises(UserError, match="out, costs, check: got none"):
        record([ModelOptions().model_path])


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
