"""Whole runs: every method gives vanilla's tokens, and a run can be told, repeated and gone on with."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from evaluation.inference import plan as planning
from evaluation.inference.command import main, parse
from evaluation.inference.plan import Participant, check_asked, prepare
from evaluation.inference.run import answer_with_method
from model.commands.command_line import UserError
from model.commands.loading import CheckedModel, check_model
from model.commands.model_options import ModelOptions
from model.kernels.registered_attention import sdpa_backends
from model.methods import METHODS, drafter_class, find_method
from tests.evaluation.conftest import (
    CHOICE_KEYS,
    OUR_CHOICE_KEYS,
    QUESTIONS,
    ROW_KEYS,
    error_line,
    figures,
    read_meta,
    read_rows,
    required_options,
    run,
    token_ids,
)
from tests.model.decoded import SEEDED

SAMPLING = ("--temperature", 0.8, "--top-p", 0.9, "--seed", 3)
DRAFTING = [method for method in METHODS if method != "vanilla"]
RECYCLING = find_method("recycling")
EOS = 2
LIMIT = 24


class Runs(dict[str, Path]):
    """An answer file of every method, made when it is first asked for."""

    def __init__(self, model: Path, folder: Path, *more: object) -> None:
        super().__init__()
        self._model, self._folder, self._more = model, folder, more

    def __missing__(self, method: str) -> Path:
        file = self[method] = self._folder / f"{method}.jsonl"
        short = f"--threads 1 --warmup 0 --max-new-tokens {LIMIT} --question-end {QUESTIONS}"
        options = [*short.split(), *required_options(method, self._model), *self._more]
        assert run(method, ["--model-path", self._model, *options], file) == 0
        return file


@pytest.fixture(scope="module")
def greedy(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An answer file of every method, greedy."""
    return Runs(tiny_model, tmp_path_factory.mktemp("greedy"))


@pytest.fixture(scope="module")
def sampled(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An answer file of every method, sampling two choices."""
    folder = tmp_path_factory.mktemp("sampled")
    return Runs(tiny_model, folder, *SAMPLING, "--num-choices", 2, "--question-end", 3)


def steps_of(file: Path) -> dict[Any, list[list[Any]]]:
    """Return what a repeated run must repeat: every token and the length of every step."""
    return figures(read_rows(file), "token_ids", "accept_lengths", "draft_tokens", "turns")


@pytest.mark.parametrize("method", DRAFTING)
def test_greedy_answers_are_those_of_vanilla(method: str, greedy: dict[str, Path]) -> None:
    assert token_ids(greedy[method]) == token_ids(greedy["vanilla"])


@pytest.mark.parametrize("method", [method for method in DRAFTING if method in SEEDED])
def test_sampled_answers_are_those_of_vanilla_under_the_same_seed(
    method: str, sampled: dict[str, Path]
) -> None:
    assert token_ids(sampled[method]) == token_ids(sampled["vanilla"])


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("recycling", "--warmup 1"),
        ("recycling-averaged", "--start cold --no-harvest-prompt --output-id-topk 12"),
        ("recycling", "--tree-version {}/tree.json --output-id-topk 3"),
        ("pld", "--match latest --max-ngram-size 2 --num-pred-tokens 4"),
        ("lookahead", "--level 3 --window 4 --guess 2"),
        ("samd", "--fallback none --match first"),
        ("samd", "--threshold 2 --tree-version {}/tree.json --output-id-topk 3 --start cold"),
    ],
)
def test_answers_are_those_of_vanilla_under_other_options_too(
    method: str, more: str, greedy: dict[str, Path], options: list[str], tmp_path: Path
) -> None:
    (tmp_path / "tree.json").write_text(json.dumps([[0], [1], [2], [0, 0], [0, 2], [0, 0, 1]]))
    file = tmp_path / "run.jsonl"
    assert run(method, options, file, *more.replace("{}", str(tmp_path)).split()) == 0
    assert token_ids(file) == token_ids(greedy["vanilla"])


@pytest.mark.parametrize(
    "method",
    # Heads and datastores are made at random here: they say nothing that the model would say.
    [one for one in DRAFTING if drafter_class(one).drafts_with() not in ("heads", "datastore")],
)
def test_drafts_are_accepted_in_the_runs_above(method: str, greedy: dict[str, Path]) -> None:
    choices = [row["choices"][0] for row in read_rows(greedy[method])]
    assert any(max(choice["accept_lengths"]) > 1 for choice in choices)


def test_the_runs_above_are_no_weak_test(greedy: dict[str, Path], sampled: dict[str, Path]) -> None:
    reasons = {
        reason
        for row in read_rows(greedy["vanilla"]) + read_rows(sampled["vanilla"])
        for choice in row["choices"]
        for reason in choice["stop_reasons"]
    }
    assert reasons == {"eos", "length"}, "answers should end in both ways"
    for first, second in token_ids(sampled["vanilla"]).values():
        assert first != second, "two choices should have their own draws"
    assert token_ids(sampled["vanilla"])[1][0] != token_ids(greedy["vanilla"])[1][0]


@pytest.mark.parametrize("broken", ["weights", "folder"])
def test_a_run_that_does_not_begin_leaves_no_file(
    broken: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty answer file would stand in the way of its folder's reports."""
    model, file = tmp_path / "model", tmp_path / "run.jsonl"
    shutil.copytree(tiny_model, model)
    given: list[object] = ["--model-path", model, "--max-new-tokens", 4]
    if broken == "weights":
        (model / "model.safetensors").write_bytes(b"no weights")
        with pytest.raises(UserError, match="weights cannot be loaded"):
            run("recycling", given, file)
        assert not file.exists()
        file.touch()
        with pytest.raises(UserError, match="weights cannot be loaded"):
            run("recycling", given, file)
        assert file.exists(), "it was there before"
    else:
        monkeypatch.setattr(planning, "DATA_FOLDER", tmp_path / "none")
        with pytest.raises(UserError, match="answer_file: got none, and there is no folder"):
            main("recycling", list(map(str, given)))


def test_a_conversations_stop_ids_end_an_answer(
    options: list[str], greedy: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    question, [[[whole, *_]]] = next(iter(token_ids(greedy["vanilla"]).items()))
    stop = whole[3]
    choose = planning.choose_conversation

    def choose_with_stop(*of: Any) -> Any:
        conversation = choose(*of)
        conversation.stop_ids = frozenset([stop])
        return conversation

    monkeypatch.setattr(planning, "choose_conversation", choose_with_stop)
    file = tmp_path / "stopped.jsonl"
    assert run("recycling", options, file) == 0
    [[[stopped, *_]]] = token_ids(file)[question]
    assert stopped == whole[: whole.index(stop) + 1]


@pytest.fixture(scope="module")
def many_ends(
    tiny_model: Path, greedy: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[Any, list[int]]]:
    """A model with several ends of text, and vanilla's texts up to the first of them."""
    whole = {key: texts[0][0][0] for key, texts in token_ids(greedy["vanilla"]).items()}
    one = next(iter(whole.values()))[2]
    another = next(ids[len(ids) // 2] for ids in whole.values() if one not in ids)
    ends = {EOS, one, another}
    model = tmp_path_factory.mktemp("ends") / "model"
    shutil.copytree(tiny_model, model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(ends)}))
    expected = {
        key: ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))]
        for key, ids in whole.items()
    }
    assert {ids[-1] for ids in expected.values()} >= {one, another}, "each should end an answer"
    return model, expected


@pytest.mark.parametrize("method", METHODS)
def test_several_ends_of_text_end_answers_alike(
    method: str,
    many_ends: tuple[Path, dict[Any, list[int]]],
    tiny_model: Path,
    options: list[str],
    tmp_path: Path,
) -> None:
    model, expected = many_ends
    file = tmp_path / "run.jsonl"
    more = ["--model-path", model, *required_options(method, tiny_model)]
    assert run(method, options, file, *more) == 0
    assert {key: texts[0][0][0] for key, texts in token_ids(file).items()} == expected


@pytest.mark.parametrize("method", METHODS)
def test_rows_are_spec_benchs_and_their_figures_agree(
    method: str, greedy: dict[str, Path], sampled: dict[str, Path]
) -> None:
    for row in read_rows(greedy[method]) + read_rows(sampled[method]):
        assert set(row) == ROW_KEYS
        for choice in row["choices"]:
            assert set(choice) == CHOICE_KEYS | OUR_CHOICE_KEYS
            assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
            assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
            assert choice["new_tokens"] == [len(ids) for ids in choice["token_ids"]]
            for ids, reason in zip(choice["token_ids"], choice["stop_reasons"], strict=True):
                assert 1 <= len(ids) <= LIMIT
                assert EOS not in ids[:-1], "a token stands past the end of text"
                assert reason == ("eos" if ids[-1] == EOS else "length")
            times = zip(
                choice["wall_time"], choice["prefill_time"], choice["decode_time"], strict=True
            )
            for wall, prefill, decode in times:
                assert wall == pytest.approx(prefill + decode)


def test_a_cold_start_forgets_what_other_questions_taught(
    greedy: dict[str, Path], options: list[str], tmp_path: Path
) -> None:
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    run("recycling-averaged", options, whole, "--start", "cold")
    run(
        "recycling-averaged", options, part, "--start", "cold", "--question-begin", 3, "--warmup", 2
    )
    cold, hot = steps_of(whole), steps_of(greedy["recycling-averaged"])
    assert steps_of(part) == {key: cold[key] for key in (4, 5, 6)}, "order or warm-up shows"
    assert hot[1] == cold[1], "the first question has nothing to remember"
    assert hot != cold, "a hot matrix should change what is drafted"
    assert not whole.with_suffix(".state").exists(), "a cold run has no state to keep"


def test_warm_up_leaves_no_mark(
    greedy: dict[str, Path], options: list[str], tmp_path: Path
) -> None:
    run("recycling-averaged", options, tmp_path / "run.jsonl", "--warmup", 2)
    assert steps_of(tmp_path / "run.jsonl") == steps_of(greedy["recycling-averaged"])


def test_warm_up_counts_as_in_the_published_code(options: list[str], tmp_path: Path) -> None:
    for count in (0, 1):
        more = ["--warmup", count, "--question-end", 1]
        run("recycling", options, tmp_path / f"{count}.jsonl", *more)
    cold, warm = (steps_of(tmp_path / f"{count}.jsonl") for count in (0, 1))
    assert cold != warm, "the matrix should remember the warm-up pass"


def test_a_saved_matrix_goes_on_where_it_was_saved(
    greedy: dict[str, Path], options: list[str], tmp_path: Path
) -> None:
    matrix = tmp_path / "matrix.safetensors"
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    run("recycling-averaged", options, first, "--question-end", 3, "--save-matrix", matrix)
    run("recycling-averaged", options, second, "--question-begin", 3, "--load-matrix", matrix)
    assert steps_of(first) | steps_of(second) == steps_of(greedy["recycling-averaged"])
    saved = load_file(matrix)
    assert {name: (part.dtype, tuple(part.shape)) for name, part in saved.items()} == {
        "adjacency": (torch.int32, (8192, 8)),
        "shares": (torch.float32, (8192, 8)),
    }
    with safe_open(matrix, "pt") as file:
        assert json.loads(file.metadata()["config"])["output_id_topk"] == 8
    assert sorted(tmp_path.glob("matrix*")) == [matrix], "a temporary file is left behind"


@pytest.mark.parametrize("more", ["--policy average", "--warmup 1"])
def test_a_resumed_hot_run_is_the_run_that_was_cut(
    more: str, options: list[str], tmp_path: Path
) -> None:
    uncut, cut = tmp_path / "uncut.jsonl", tmp_path / "cut.jsonl"
    run("recycling", options, uncut, *more.split())
    for end in (1, 4, QUESTIONS):
        run("recycling", options, cut, *more.split(), "--question-end", end)
    assert steps_of(cut) == steps_of(uncut)
    meta = read_meta(cut)
    assert len(meta["resumed"]) == 2
    assert meta["question_end"] == QUESTIONS


class Forgetful(drafter_class("pld")):  # type: ignore[misc]
    """A method of somebody's own that keeps something from question to question, and cannot save it."""

    def reset(self) -> None:
        super().reset()


def test_a_method_whose_memory_cannot_be_saved_is_not_gone_on_with(
    options: list[str], tmp_path: Path
) -> None:
    file, method = tmp_path / "own.jsonl", f"{__name__}:Forgetful"
    assert run(method, options, file) == 0
    whole = steps_of(file)
    assert run(method, options, file) == 0, "a finished run needs no memory"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:1]))
    with pytest.raises(UserError, match=r"cannot resume .*Forgetful has a reset, and no memory"):
        run(method, options, file)
    assert file.read_text() == lines[0]
    assert run(method, options, file, "--overwrite") == 0
    assert steps_of(file) == whole


def test_a_run_that_was_broken_off_after_its_last_answer_is_finished(
    greedy: dict[str, Path], options: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_bytes(greedy["pld"].read_bytes())
    request.getfixturevalue("no_weights")
    meta = read_meta(greedy["pld"]) | {"end_time": None}
    file.with_suffix(".meta.json").write_text(json.dumps(meta))
    assert run("pld", options, file) == 0
    assert read_meta(file)["end_time"] > meta["start_time"]
    assert file.read_bytes() == greedy["pld"].read_bytes()


def test_a_finished_run_is_left_as_it_is(
    greedy: dict[str, Path], options: list[str], tiny_model: Path, request: pytest.FixtureRequest
) -> None:
    done = {method: greedy[method] for method in METHODS}
    request.getfixturevalue("no_weights")
    for method, file in done.items():
        files = (file, file.with_suffix(".meta.json"))
        before = [part.read_bytes() for part in files]
        given = [*options, *required_options(method, tiny_model)]
        assert run(method, given, file) == 0
        assert run(method, given, file, "--resume") == 0
        assert [part.read_bytes() for part in files] == before


def test_overwrite_begins_anew(options: list[str], tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    run("recycling", options, file, "--question-end", 2)
    run("recycling", options, file, "--question-end", 1, "--overwrite", "--max-new-tokens", 5)
    assert [row["question_id"] for row in read_rows(file)] == [1]
    assert read_meta(file)["max_new_tokens"] == 5


def test_the_sidecar_says_what_was_run_with_what(
    tiny_model: Path, sampled: dict[str, Path]
) -> None:
    meta = read_meta(sampled["recycling"])
    _, config, _ = parse(RECYCLING, [])
    expected = {
        "method": "recycling",
        "model_path": str(tiny_model),
        "model_id": "tiny-recycling-float32-temp-0.8",
        "bench_name": "demo",
        "question_begin": None,
        "question_end": 3,
        "max_new_tokens": LIMIT,
        "num_choices": 2,
        "temperature": 0.8,
        "top_k": 0,
        "top_p": 0.9,
        "seed": 3,
        "warmup": 0,
        "conv_template": "tokenizer",
        "dtype": "float32",
        "threads": 1,
        "sdpa_backends": None,
        "graphs": None,
        "argv": sys.argv[1:],
        "load_matrix": None,
    }
    assert {name: meta[name] for name in expected} == expected
    assert meta["options"] == {name: getattr(config, name) for name in config.__slots__}
    assert meta["options"]["harvest_prompt"] is False, "resolved, though it was not given"
    assert meta["device"].startswith("cpu")
    kernels = meta["kernel_names"]
    has_kernels = {kernels["linear"], kernels["attention"]} & {"few-rows", "few-queries"}
    assert meta["lacks_kernels"] is not bool(has_kernels)
    assert kernels.keys() == {"linear", "attention", "norms", "layers"}
    assert kernels["norms"] == "as-they-are"
    assert meta["versions"]["torch"] == torch.__version__
    assert {"python", "transformers", "tokenizers", "fschat"} <= set(meta["versions"])
    assert meta["git_commit"] is None or len(meta["git_commit"].removesuffix("-dirty")) == 12
    assert len(meta["question_file_sha256"]) == 64
    stamps = [row["tstamp"] for row in read_rows(sampled["recycling"])]
    assert meta["start_time"] <= stamps[0] <= stamps[-1] <= meta["end_time"]


def sidecar_on(
    device: str, options: list[str], file: Path, name: str = "vanilla"
) -> dict[str, Any]:
    """Return the sidecar of a run that is checked as if on this device."""
    method = find_method(name)
    run_config, config, _ = parse(method, [*options, "--answer-file", str(file)])
    asked = check_asked(run_config)
    asked = asked._replace(model=asked.model._replace(device=torch.device(device)))
    plan = prepare(asked, Participant(name, method, config), run_config)
    plan.log.begin()
    plan.log.close()
    return read_meta(file)


def test_the_sidecar_says_which_attention_pytorch_had_on_a_gpu(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "device_name", str)
    assert sidecar_on("cpu", options, tmp_path / "cpu.jsonl")["sdpa_backends"] is None
    assert sidecar_on("cuda", options, tmp_path / "gpu.jsonl")["sdpa_backends"] == sdpa_backends(
        torch.device("cuda")
    )


@pytest.mark.parametrize(
    ("device", "more", "expected"),
    [
        *(("cuda", "", "auto"), ("cuda", "--graphs off", "off")),
        ("cpu", "--graphs off", None),
        ("cuda", "--num-gpus-per-model 2 --num-gpus-total 2", None),
    ],
)
def test_the_sidecar_says_whether_passes_are_graphs_where_that_is_a_choice(
    device: str,
    more: str,
    expected: str | None,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "device_name", str)
    monkeypatch.setattr(planning, "check_run_model", lambda run: on_the_cpu(run.model))
    file = tmp_path / "run.jsonl"
    assert sidecar_on(device, [*options, *more.split()], file)["graphs"] == expected


def test_masks_that_graphs_do_not_read_are_refused_before_the_weights_load(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "device_name", str)
    monkeypatch.setattr(planning, "check_run_model", lambda run: on_the_cpu(run.model))
    file = tmp_path / "run.jsonl"
    for workers in ("", "--num-gpus-total 2"):
        with pytest.raises(UserError, match=r"graphs: got auto with esp on cuda, .* --graphs off"):
            sidecar_on("cuda", [*options, *workers.split()], file, "esp")
    assert sidecar_on("cuda", [*options, "--graphs", "off"], file, "esp")["graphs"] == "off"
    assert sidecar_on("cpu", options, tmp_path / "cpu.jsonl", "esp")["graphs"] is None


def on_the_cpu(model: ModelOptions) -> CheckedModel:
    """Check a model's files, without the GPUs that it should be spread over."""
    return check_model(replace(model, num_gpus_per_model=1))


def test_answers_without_a_given_name_lie_beside_their_questions_under_the_runs_name(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "DATA_FOLDER", tmp_path)
    given = [*options, "--question-end", "1", "--output-id-topk", "9"]
    run_config, config, _ = parse(RECYCLING, given)
    participant = Participant("recycling", RECYCLING, config)
    assert answer_with_method(participant, run_config, None, None) == 0
    name = "tiny-recycling-output-id-topk-9-float32-temp-0.0"
    file = tmp_path / "demo" / "model_answer" / f"{name}.jsonl"
    assert [row["model_id"] for row in read_rows(file)] == [name]


def test_runs_of_other_options_have_other_names(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "wide.json").write_text("[[0]]")
    others = (
        *("", "--policy average --start cold", "--policy average", "--output-id-topk 9"),
        "--policy average --no-harvest-prompt",
        *("--dtype float64", "--temperature 0.5", f"--tree-version {tmp_path}/wide.json"),
        "--tree-version auto",
    )
    names = set()
    for number, other in enumerate(others):
        given = [*options, *other.split(), "--answer-file", str(tmp_path / f"{number}.jsonl")]
        run, config, _ = parse(RECYCLING, given)
        plan = prepare(check_asked(run), Participant("recycling", RECYCLING, config), run)
        plan.log.close()
        names.add(plan.model_id)
    assert len(names) == len(others), f"two runs share a name: {sorted(names)}"
    assert "tiny-recycling-tree-version-wide-float32-temp-0.0" in names
    assert "tiny-recycling-tree-version-auto-float32-temp-0.0" in names, "no derived option"


def test_questions_are_asked_by_the_length_of_their_first_prompt(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("vanilla", options, tmp_path / "all.jsonl", "--max-new-tokens", 2) == 0
    lengths = {
        row["question_id"]: row["choices"][0]["prompt_tokens"][0]
        for row in read_rows(tmp_path / "all.jsonl")
    }
    most = sorted(lengths.values())[2]
    few = ["--max-new-tokens", 2, "--prompt-tokens", f":{most}"]
    assert run("vanilla", options, tmp_path / "few.jsonl", *few) == 0
    asked = [row["question_id"] for row in read_rows(tmp_path / "few.jsonl")]
    assert asked == [key for key, length in lengths.items() if length <= most]
    assert read_meta(tmp_path / "few.jsonl")["prompt_tokens"] == f":{most}"
    capsys.readouterr()
    for bounds, message in (("9999:", "which none of"), ("9:8", "allowed: MIN:MAX")):
        line = error_line("vanilla", [*options, "--prompt-tokens", bounds], capsys)
        assert message in line
