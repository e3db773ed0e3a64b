"""A GGUF file given to the inference commands: answers end to end, its fingerprint, errors in one line.

Run: pytest tests/evaluation/inference/test_gguf_runs.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evaluation.answers.record import model_fingerprint
from model.api.loading import weights
from model.commands.loading import check_model, load_target
from model.commands.model_options import ModelOptions
from tests.evaluation.conftest import error_line, read_meta, run, token_ids
from tests.model.api.loading.tiny_gguf import tiny_llama, write_gguf

SHORT = ["--threads", "1", "--warmup", "0", "--max-new-tokens", "24", "--question-end", "2"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as a GGUF file."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama())


def test_methods_answer_with_the_tokens_of_the_weights_that_were_written(
    file: Path, tmp_path: Path
) -> None:
    options = ["--model-path", file, *SHORT]
    for method in ("vanilla", "recycling"):
        assert run(method, options, tmp_path / f"{method}.jsonl") == 0
    found = token_ids(tmp_path / "vanilla.jsonl")
    assert token_ids(tmp_path / "recycling.jsonl") == found
    target = load_target(ModelOptions(str(file)), check_model(ModelOptions(str(file))))
    expected = tiny_llama().state_dict()
    assert all(
        torch.equal(part, expected[name]) for name, part in target.model.state_dict().items()
    )
    assert len(found) == 2 and all(turn for row in found.values() for turn in row[0])


def test_the_sidecar_has_the_fingerprint_of_the_file(file: Path, tmp_path: Path) -> None:
    assert run("vanilla", ["--model-path", file, *SHORT], tmp_path / "a.jsonl") == 0
    meta = read_meta(tmp_path / "a.jsonl")
    assert meta["model_path"] == str(file)
    assert meta["model_fingerprint"] == model_fingerprint(str(file), None)


def test_the_fingerprint_is_that_of_the_content(file: Path, tmp_path: Path) -> None:
    changed = tmp_path / file.name
    content = bytearray(file.read_bytes())
    changed.write_bytes(content)
    assert model_fingerprint(str(changed), None) == model_fingerprint(str(file), None)
    content[-1] ^= 1
    changed.write_bytes(content)
    assert model_fingerprint(str(changed), None) != model_fingerprint(str(file), None)


def error_of(file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a model is refused with."""
    return error_line("vanilla", ["--model-path", str(file), *SHORT], capsys)


@pytest.mark.usefixtures("no_weights")
def test_what_is_no_gguf_file_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "none.gguf; allowed: an existing GGUF file" in error_of(tmp_path / "none.gguf", capsys)
    (tmp_path / "x.gguf").write_bytes(b"GGML")
    assert "x.gguf is not a GGUF file" in error_of(tmp_path / "x.gguf", capsys)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert "x.gguf: cannot be loaded" in error_of(tmp_path / "x.gguf", capsys)


@pytest.mark.usefixtures("no_weights")
def test_an_architecture_that_transformers_does_not_read_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_gguf(tmp_path / "x.gguf", tiny_llama(), architecture="gizmo")
    assert "x.gguf: got architecture gizmo; allowed: bloom, " in error_of(file, capsys)


@pytest.mark.usefixtures("no_weights")
def test_a_missing_package_is_named_in_one_line(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "find_spec", lambda _: None)
    assert "need gguf and accelerate; pip install gguf accelerate" in error_of(file, capsys)


def test_weights_that_are_cut_off_or_missing_are_refused(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.gguf").write_bytes(file.read_bytes()[:-4096])
    assert "x.gguf" in _last_line(tmp_path / "x.gguf", capsys)
    lacking = write_gguf(tmp_path / "y.gguf", tiny_llama(), left_out="blk.0.attn_q.weight")
    assert "lacks 1 weights" in _last_line(lacking, capsys)


def _last_line(file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of a command that must fail; progress bars of loading come before it."""
    from evaluation.inference import command
    from model.commands.command_line import run_command

    words = ["--model-path", str(file), *SHORT, "--answer-file", str(file.with_suffix(".jsonl"))]
    with pytest.raises(SystemExit) as exit_:
        run_command(lambda _: command.main("vanilla", words))
    assert exit_.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    return line
