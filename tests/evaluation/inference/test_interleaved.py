"""A comparison answers as the inference commands do, in turn, and goes on where it was cut.

Run: pytest tests/evaluation/inference/test_interleaved.py
"""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from evaluation import compare
from evaluation.answers.log import AnswerLog
from evaluation.answers.row import AnswerRow
from evaluation.inference import run as running
from evaluation.inference.answering import Prompt
from evaluation.inference.command import participant_of, participants_of
from evaluation.inference.config import DecodingOptions, RunConfig
from evaluation.inference.run import answerer_of, in_turn
from evaluation.questions import questions
from evaluation.questions.questions import DATA_FOLDER, Question
from model.backends.target import TargetModel
from model.commands.command_line import UserError
from model.commands.model_options import DEMO_MODEL
from tests.evaluation.conftest import QUESTIONS, figures, read_meta, read_rows, run, write_rows

METHODS = ("vanilla", "recycling", "pld --match latest", "lookahead-auto", "generate")
STEPS = ("token_ids", "accept_lengths", "turns")


def compared(options: Sequence[str], folder: Path, *more: object) -> int:
    """Run a comparison of METHODS in this process; return its exit code."""
    return compare.main([*options, "--methods", *METHODS, "--out", str(folder), *map(str, more)])


def files_of(folder: Path, run_name: str = "") -> dict[str, Path]:
    """Return the answer files of a folder by participant."""
    begin, end = "tiny-", f"-float32-temp-0.0-24{run_name}.jsonl"
    return {
        file.name.removeprefix(begin).removesuffix(end): file for file in folder.glob("*" + end)
    }


@pytest.fixture(scope="module")
def uncut(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of a comparison that nobody interrupted."""
    folder = tmp_path_factory.mktemp("uncut")
    assert compared(options, folder) == 0
    return files_of(folder)


def steps_of(file: Path) -> Any:
    """Return everything about answers that a clock has no part in."""
    return figures(read_rows(file), *STEPS)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9])
def test_everybody_follows_everybody_equally_often(count: int) -> None:
    num_questions = 2 * count
    order = list(in_turn(range(count), num_questions))
    assert [index for index, _ in order] == [i for i in range(num_questions) for _ in range(count)]
    rows = [
        [participant for index, participant in order if index == row]
        for row in range(num_questions)
    ]
    assert all(sorted(row) == list(range(count)) for row in rows), "every question goes to all"
    assert set(Counter(row[0] for row in rows).values()) == {2}, "all are first equally often"
    after = Counter(pair for row in rows for pair in itertools.pairwise(row))
    assert len(after) == count * (count - 1) and set(after.values()) <= {2}


def test_answers_are_those_of_the_inference_commands(
    uncut: dict[str, Path], options: list[str], tmp_path: Path
) -> None:
    single = tmp_path / "single.jsonl"
    for participant, method, more in (
        ("vanilla", "vanilla", ""),
        ("vanilla-again", "vanilla", ""),
        ("recycling", "recycling", ""),
        ("pld-match-latest", "pld", "--match latest"),
    ):
        as_compared = ("--shuffle", "0", "--overwrite")
        assert run(method, options, single, *more.split(), *as_compared) == 0
        assert steps_of(uncut[participant]) == steps_of(single), participant
        mine, theirs = read_meta(uncut[participant]), read_meta(single)
        for key in ("method", "options", "device", "dtype", "threads", "model_fingerprint"):
            assert mine[key] == theirs[key], key
    ids = figures(read_rows(uncut["vanilla"]), "token_ids")
    for participant in ("lookahead-auto", "generate"):
        assert figures(read_rows(uncut[participant]), "token_ids") == ids, participant


def test_sidecars_say_who_ran_together_and_who_measures_the_noise(uncut: dict[str, Path]) -> None:
    together = ["vanilla", "recycling", "pld-match-latest", "lookahead-auto", "generate"]
    for participant, file in uncut.items():
        meta = read_meta(file)
        assert meta["interleaved_with"] == [*together, "vanilla-again"]
        assert meta["interleaved_run"] == read_meta(uncut["vanilla"])["interleaved_run"]
        assert meta.get("role") == ("noise floor" if participant == "vanilla-again" else None)
    assert set(uncut) == {*together, "vanilla-again"}


def test_rows_have_cpu_seconds(uncut: dict[str, Path]) -> None:
    for file in uncut.values():
        for row in read_rows(file):
            choice = row["choices"][0]
            assert len(choice["cpu_time"]) == len(choice["wall_time"])
            assert all(seconds > 0 for seconds in choice["cpu_time"])


@pytest.mark.parametrize("num_appended", [1, 13, 30])
def test_a_cut_comparison_goes_on_as_if_it_had_not_been(
    num_appended: int,
    uncut: dict[str, Path],
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "cut"
    left = [num_appended]
    append = AnswerLog.append

    def append_some(log: AnswerLog, row: AnswerRow, memory: Any) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        append(log, row, memory)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(AnswerLog, "append", append_some)
        compared(options, folder)
    assert sum(len(read_rows(file)) for file in files_of(folder).values()) == num_appended
    assert compared(options, folder) == 0
    for participant, file in files_of(folder).items():
        if participant != "lookahead-auto":  # whose numbers of nodes follow the clock
            assert steps_of(file) == steps_of(uncut[participant]), participant
        assert len(read_rows(file)) == QUESTIONS


def test_a_finished_comparison_needs_no_model(
    uncut: dict[str, Path], options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {file: file.read_bytes() for file in uncut.values()}
    monkeypatch.setattr(running, "load_target", lambda *_: pytest.fail("it was loaded"))
    assert compared(options, uncut["vanilla"].parent) == 0
    assert before == {file: file.read_bytes() for file in uncut.values()}


def test_a_method_that_joins_later_is_said_to_be_alone(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def compare_these(*methods: str) -> str:
        assert compare.main([*options, "--out", str(tmp_path), "--methods", *methods]) == 0
        return capsys.readouterr().err

    assert "WARNING" not in compare_these("vanilla")
    joined = compare_these("vanilla", "pld")
    assert "WARNING: answers of tiny-vanilla-" in joined and "not measured in turn" in joined


def test_runs_begin_anew_each_time(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = (*options, "--question-end", "2")
    assert compared(few, tmp_path, "--runs", 2) == 0
    first, second = files_of(tmp_path, "-run-1"), files_of(tmp_path, "-run-2")
    assert set(first) == set(second) and len(first) == len(METHODS) + 1
    assert steps_of(first["recycling"]) == steps_of(second["recycling"])
    ended = {participant: read_meta(file)["end_time"] for participant, file in first.items()}
    for file in second.values():
        write_rows(file, [])
        shutil.rmtree(file.with_suffix(".state"), ignore_errors=True)
    capsys.readouterr()
    assert compared(few, tmp_path, "--runs", 2) == 0
    assert "WARNING" not in capsys.readouterr().err, "a run that is done does not join another"
    assert ended == {
        participant: read_meta(file)["end_time"] for participant, file in first.items()
    }


def test_several_benchmarks_have_a_folder_each(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (DATA_FOLDER / "demo" / "question.jsonl").read_text(encoding="utf-8").splitlines()
    for bench, count in (("one", 5), ("two", 9)):
        folder = tmp_path / "data" / bench
        folder.mkdir(parents=True)
        (folder / "question.jsonl").write_text("\n".join(lines[:count]), encoding="utf-8")
    monkeypatch.setattr(questions, "DATA_FOLDER", tmp_path / "data")
    asked = ["--bench-name", "one", "two", "--num-questions", "3", "--question-end", "9"]
    assert compare.main([*options, *asked, "--methods", "vanilla", "--out", str(tmp_path)]) == 0
    for bench, ids in (("one", [1, 3, 5]), ("two", [1, 5, 9])):
        (file,) = tmp_path.glob(f"{bench}/tiny-vanilla-float32*.jsonl")
        assert sorted(row["question_id"] for row in read_rows(file)) == ids
        meta = read_meta(file)
        assert (meta["bench_name"], meta["num_questions"]) == (bench, 3)


def test_threads_of_earlier_answers_are_kept(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compared(options, tmp_path, "--question-end", 2) == 0
    for file in files_of(tmp_path).values():
        assert read_meta(file)["threads"] == 1
        write_rows(file, read_rows(file)[:1])
    monkeypatch.setattr("torch.get_num_threads", lambda: 7)
    kept: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", kept.append)
    without = [word for word in options if word not in ("--threads", "1")]
    # Recycling's memory is of two rows, and so is not found: threads are settled before that.
    with pytest.raises(UserError, match="memory"):
        compared(without, tmp_path)
    assert set(kept) == {1}


@pytest.mark.parametrize(
    ("words", "draft_model", "says"),
    [
        (["pld"], None, "vanilla, the baseline, must be among them"),
        (["vanilla", "vanilla_"], None, "got 'vanilla_'"),
        (["vanilla", "vanilla-auto"], None, "got 'vanilla-auto'"),
        (["vanilla", "pld", "pld"], None, "allowed: each once"),
        (["vanilla", "generate --top-k 3"], None, "generate takes no options"),
        (["vanilla", "pld --temperature 1"], None, "allowed: options of pld itself"),
        (["vanilla", "recycling --save-matrix x"], None, "allowed: options of recycling itself"),
        (["vanilla", "sps"], None, "give the model that sps drafts with"),
        (["vanilla", "generate-assisted"], None, "give the model that generate-assisted"),
        (
            ["vanilla", "pld"],
            "some/model",
            "only sps, generate-assisted and llama.cpp-draft use it",
        ),
        (["vanilla", "medusa --num-nodes 5"], None, 'folder of medusa.s heads: "medusa --heads'),
    ],
)
def test_entrants_that_cannot_be_are_refused(
    words: list[str], draft_model: str | None, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        participants_of(words, "some/target", draft_model)


def test_heads_are_named_or_the_demo_models() -> None:
    words = ["vanilla", "medusa", "medusa --num-nodes 5 --heads mine", "medusa --heads=its"]
    found = [participant.config for participant in participants_of(words, str(DEMO_MODEL))[1:]]
    assert [config.heads for config in found] == [
        str(DEMO_MODEL.with_name("medusa")),
        "mine",
        "its",
    ]


def test_an_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        participants_of(["vanilla", "pld --match nosuch"], "some/target")
    assert "--match" in capsys.readouterr().err


def test_referees_count_their_steps(options: list[str], tiny_model: Path, tmp_path: Path) -> None:
    names = ("generate", "generate-static", "generate-pld", "generate-assisted")
    more = ("--draft-model", str(tiny_model), "--out", str(tmp_path))
    assert compare.main([*options, "--methods", "vanilla", *names, *more]) == 0
    files = files_of(tmp_path)
    for name in names:
        rows = read_rows(files[name])
        assert figures(rows, "token_ids") == figures(read_rows(files["vanilla"]), "token_ids")
        for row in rows:
            choice = row["choices"][0]
            assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
        longest = max(max(row["choices"][0]["accept_lengths"]) for row in rows)
        assert (longest > 1) == (name in ("generate-pld", "generate-assisted"))


@pytest.mark.parametrize("name", ["generate", "generate-pld"])
def test_a_referee_ends_with_the_models_context_as_our_methods_do(name: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32},
        **{"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32},
    )
    target = TargetModel(LlamaForCausalLM(config).eval())
    prompt = list(range(1, 29))
    ours, theirs = (
        answerer_of(plan_of(words), target).answer(
            Prompt(prompt, None, Question(1, "", ()), 0, 0, ())
        )
        for words in ("vanilla", name)
    )
    assert len(ours.token_ids) == 4
    assert theirs.token_ids == ours.token_ids


def plan_of(words: str) -> Any:
    """Return what an answerer reads of a plan: 16 new tokens, and nothing else that ends a text."""
    return SimpleNamespace(
        participant=participant_of(words),
        model=SimpleNamespace(tokenizer=None),
        run=RunConfig(sampling=DecodingOptions(max_new_tokens=16)),
        start_memory={},
        eos_ids=lambda _: frozenset(),
        stop_criterion=lambda: None,
    )


def test_words_become_options() -> None:
    words = ["hybrid --budget fixed", "vanilla", "pld-auto", "recycling --tree-version 2.2.2"]
    participants = participants_of(words, "some/target")
    assert [participant.label for participant in participants] == [
        "vanilla",
        "hybrid-budget-fixed",
        "pld-auto",
        "recycling-tree-version-2.2.2",
    ]
    assert participants[1].config.budget == "fixed"
    assert participants[2].config.budget == "auto"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--num-questions", "0"), "num_questions: got 0; allowed: 1 or more"),
        (("--bench-name", "demo", "demo"), "bench_name: got demo demo; allowed: each once"),
        (("--bench-name", "demo", "nosuch"), "nosuch/question.jsonl does not exist"),
        (
            ("--bench-name", "demo", "mbpp", "--question-file", "x"),
            "question_file: got it with --bench-name demo mbpp",
        ),
        (("--runs", "0"), "runs: got 0; allowed: 1 or more"),
        (("--temperature", "0.5", "--methods", "vanilla", "generate"), "generate, which is greedy"),
        (("--model-id", "a/b"), "model_id: got 'a/b'"),
    ],
)
def test_options_that_cannot_be_are_refused_before_the_weights_load(
    more: tuple[str, ...], says: str, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "load_target", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(UserError, match=says):
        compare.main([*options, *more])


def test_a_quotation_that_does_not_end_is_refused() -> None:
    for words in ('pld "--match latest', "generate-pld '"):
        with pytest.raises(UserError, match=r"methods: got .*No closing quotation; close the"):
            participants_of(["vanilla", words], str(DEMO_MODEL))
