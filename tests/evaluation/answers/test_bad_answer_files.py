"""Answer files, folders and tokenizers that cannot be used are refused in one line, and left as they
are.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.evaluation.conftest import ROOT, TOKENIZER_FILES, error_line, run, write_rows

HOLD_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def finished(options: list[str], tmp_path: Path) -> Path:
    """The answers of a finished run of one question."""
    file = tmp_path / "run.jsonl"
    assert run("recycling", options, file, "--question-end", 1) == 0
    return file


def _refused(
    file: Path, options: list[str], capsys: pytest.CaptureFixture[str], method: str = "recycling"
) -> str:
    """Return the line that refuses an answer file; its bytes and its folder stay as they were."""
    before = file.read_bytes() if file.is_file() else None
    beside = sorted(file.parent.iterdir()) if file.parent.is_dir() else None
    capsys.readouterr()
    line = error_line(method, [*options, "--answer-file", str(file)], capsys)
    assert str(file.with_suffix("")) in line, f"the line should name {file} or its sidecar: {line}"
    if before is not None:
        assert file.read_bytes() == before, "a refused command changed the answer file"
        assert sorted(file.parent.iterdir()) == beside, "a refused command left files"
    return line


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("content", ["no line end", '{"question_id": 1}\nno line end', "a line\n"])
@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_a_file_of_something_else_is_never_touched(
    content: str, more: list[str], options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "notes.txt"
    file.write_text(content)
    assert "sidecar" in _refused(file, [*options, *more], capsys)


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ("--max-new-tokens 25", ("max_new_tokens", "24", "25")),
        ("--output-id-topk 9", ("options", "9")),
        ("--policy average", ("options", "average")),
        ("--temperature 0.5", ("temperature", "0.5")),
        ("--conv-template raw", ("conv_template", "'tokenizer'", "'raw'")),
        ("--dtype float64", ("dtype", "'float64'")),
        ("--model-id other", ("model_id", "'other'")),
    ],
)
def test_an_answer_file_of_another_run_is_refused_with_the_option_that_differs(
    more: str,
    names: tuple[str, ...],
    finished: Path,
    options: list[str],
    no_weights: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keep_id = [] if "--model-id" in more else ["--model-id", "tiny-recycling-float32-temp-0.0"]
    line = _refused(finished, [*options, *keep_id, *more.split()], capsys)
    for name in (*names, "--overwrite", "--answer-file"):
        assert name in line, f"the line should say {name!r}: {line}"


def test_an_answer_file_of_another_method_or_other_questions_is_refused(
    finished: Path, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same_id = ["--model-id", "tiny-recycling-float32-temp-0.0"]
    assert "method" in _refused(finished, [*options, *same_id], capsys, "vanilla")
    other = {"question_id": 1, "category": "qa", "turns": ["Who?"]}
    questions = write_rows(tmp_path / "other.jsonl", [other])
    line = _refused(finished, [*options, "--question-file", str(questions)], capsys)
    assert "question_file_sha256" in line


@pytest.mark.parametrize("content", [None, "{oops", "[]", "\xff"])
def test_answers_whose_sidecar_is_missing_or_broken_are_refused(
    content: str | None, finished: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sidecar = finished.with_suffix(".meta.json")
    sidecar.unlink()
    if content is not None:
        sidecar.write_text(content, encoding="latin-1")
    assert sidecar.name in _refused(finished, options, capsys)


def test_a_hot_run_without_its_matrix_is_not_resumed(
    finished: Path, options: list[str], no_weights: None, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(finished.with_suffix(".state"))
    line = _refused(finished, options, capsys)
    assert "rows-1.safetensors" in line
    assert "--overwrite" in line


@pytest.mark.usefixtures("no_weights")
def test_answers_that_another_process_writes_are_refused(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.jsonl"
    command = [sys.executable, "-c", HOLD_LOCK, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        assert "another process" in _refused(file, options, capsys)
        assert "another process" in _refused(file, [*options, "--overwrite"], capsys)
        assert other.stdin is not None
        other.stdin.close()


@pytest.mark.usefixtures("no_weights")
def test_an_answer_file_that_cannot_be_written_is_refused(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "cannot be written" in _refused(tmp_path, options, capsys)
    (tmp_path / "file").touch()
    assert "cannot be written" in _refused(tmp_path / "file" / "run.jsonl", options, capsys)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.usefixtures("no_weights")
def test_a_read_only_folder_is_refused(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    assert "cannot be written" in _refused(folder / "run.jsonl", options, capsys)
    assert "save_matrix" in error_line(
        "recycling", [*options, "--save-matrix", str(folder / "m")], capsys
    )


@pytest.mark.usefixtures("no_weights")
def test_a_tokenizer_without_chat_template_is_refused_with_a_template_to_give(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in {"config.json", *TOKENIZER_FILES} - {"chat_template.jinja"}:
        shutil.copy(tiny_model / name, model)
    line = error_line("vanilla", ["--model-path", str(model)], capsys)
    assert "no chat template" in line
    assert "--conv-template" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.usefixtures("no_weights")
def test_a_gpu_that_is_not_there_is_refused(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_line("vanilla", [*options, "--device", "cuda"], capsys)
    assert "'cuda'" in line
    assert "cpu" in line


def test_weights_that_cannot_be_loaded_are_refused_and_keep_the_answers(
    finished: Path, options: list[str], tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = finished.parent / "broken"
    shutil.copytree(tiny_model, model)
    (model / "model.safetensors").write_bytes(b"x" * 100)
    before = finished.read_bytes()
    capsys.readouterr()
    given = [*options, "--model-path", str(model), "--answer-file", str(finished), "--overwrite"]
    line = error_line("recycling", given, capsys)
    assert str(model) in line
    assert finished.read_bytes() == before, "--overwrite forgot answers before the model was there"


@pytest.mark.parametrize(
    ("method", "given", "says"),
    [
        ("pld", ["--model-path", "org/none"], "org/none: cannot be loaded"),
        ("vanilla", ["--bench_name", "nosuch"], "nosuch"),
        ("lookahead", ["--levels", "5"], "unrecognized arguments: --levels"),
    ],
)
def test_a_command_that_cannot_begin_changes_no_answer(
    method: str,
    given: list[str],
    says: str,
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = finished.read_bytes()
    capsys.readouterr()
    assert says in error_line(method, [*given, "--answer-file", str(finished)], capsys)
    assert finished.read_bytes() == before, "a refused command changed the answer file"


def test_a_real_process_says_one_line_and_exits_with_2(
    finished: Path, options: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    bert = tmp_path / "bert"
    bert.mkdir()
    for name in TOKENIZER_FILES:
        shutil.copy(tiny_model / name, bert)
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 8}
    (bert / "config.json").write_text(json.dumps(config))
    before = finished.read_bytes()
    command = [sys.executable, "-m", "evaluation.inference_recycling", *options]
    command += ["--model-path", str(bert), "--answer-file", str(finished)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "causal language model" in done.stderr
    assert finished.read_bytes() == before, "a refused process changed the answer file"
