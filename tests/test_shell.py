"""The shell commands: usage, and what they refuse before anything is set up or run."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch

from evaluation import compare
from model.commands.command_line import UserError
from scripts import download_model

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = (
    "MODEL_PATH",
    "BENCH",
    "METHODS",
    "DRAFT_MODEL",
    "DATASTORE",
    "DTYPE",
    "MAX_NEW_TOKENS",
    "RUNS",
    "BATCH_SIZE",
    "DEVICES",
    "GRAPHS",
    "ALLOW_PICKLE",
    "TEMPERATURE",
    "REPORT",
    "OVERWRITE",
)
SCRIPTS = sorted(
    file
    for pattern in ("*.sh", "scripts/*.sh", ".ci/run")
    for file in ROOT.glob(pattern)
    if file.is_file()
)


def run_eval(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run eval.sh with settings, from another folder, with this interpreter."""
    return subprocess.run(
        ["bash", str(ROOT / "eval.sh"), *arguments],
        cwd="/",
        env={**os.environ, "PYTHON": sys.executable, **settings},
        capture_output=True,
        text=True,
        check=False,
    )


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """Return the one line of an error, and check that nothing was answered before."""
    assert done.stdout == ""
    assert "answer/s" not in done.stderr, "no method should have run"
    refused = done.stderr.splitlines()[-1]
    assert refused.startswith("error: ")
    return refused


def run_without_commands(folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run eval.sh with commands that answer nothing; `folder` gets the words of each."""
    python, log = folder / "python", folder / "commands"
    python.write_text(
        f"""#!/bin/sh
case "$*" in
    *" evaluation."* | *" scripts."*) printf '%s\037' "$@" >> {log}; echo >> {log} ;;
    *) exec {sys.executable} "$@" ;;
esac
echo "1 answers in vanilla.jsonl"
echo "1 answers in recycling.jsonl"
"""
    )
    python.chmod(0o755)
    done = run_eval(**{"PYTHON": str(python), "METHODS": "vanilla recycling", **settings})
    assert done.returncode == 0, done.stderr
    return done


def commands_of(folder: Path, **settings: str) -> dict[str, list[str]]:
    """Return the words that eval.sh gives each command, by the command's name."""
    run_without_commands(folder, **settings)
    lines = [line.split("\037")[1:-1] for line in (folder / "commands").read_text().splitlines()]
    return {name.rpartition(".")[2]: words for name, *words in lines}


def refusal_of_compare(folder: Path, **settings: str) -> str:
    """Return how the comparison refuses, in this process, what eval.sh gives it."""
    words = commands_of(folder, **{"DEVICES": "cpu", **settings})["compare"]
    said = io.StringIO()
    with redirect_stderr(said), pytest.raises((UserError, SystemExit)) as refused:
        compare.main(words)
    return said.getvalue() or f"error: {refused.value}"


def no_compiler(empty: Path) -> dict[str, str]:
    """Settings of a machine without a C++ compiler, where nothing was built before."""
    return {"CXX": "no-such-compiler", "TORCH_EXTENSIONS_DIR": str(empty)}


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_prints_usage_with_every_setting(option: str) -> None:
    done = run_eval(option)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.startswith("bash eval.sh")
    for name in SETTINGS:
        assert f"\n  {name} " in done.stdout, f"--help should explain {name}"


@pytest.mark.parametrize("argument", ["spec_bench", "--bench"])
def test_an_argument_is_refused(argument: str) -> None:
    done = run_eval(argument)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert argument in done.stderr
    assert "--help" in done.stderr


@pytest.mark.parametrize("methods", ["recycling pld", "vanilla_", "recycling"])
def test_methods_without_the_baseline_are_refused(methods: str, tmp_path: Path) -> None:
    refused = refusal_of_compare(tmp_path, METHODS=methods)
    assert refused.startswith("error: methods: got ") and "vanilla" in refused


@pytest.mark.parametrize("method", ["sps", "sps-auto"])
def test_sps_without_a_draft_model_is_refused(method: str, tmp_path: Path) -> None:
    settings = {"METHODS": f"vanilla {method}", "MODEL_PATH": "/nowhere"}
    assert refusal_of_compare(tmp_path, **settings).startswith("error: draft_model: got none")


def test_rest_without_a_datastore_is_refused(tmp_path: Path) -> None:
    settings = {"METHODS": "vanilla rest", "MODEL_PATH": str(ROOT / "data/demo/model")}
    refused = refusal_of_compare(tmp_path, **settings)
    assert refused.startswith("error: datastore: got none; give a file; build one with")


def test_a_datastore_that_no_method_drafts_from_is_refused() -> None:
    done = run_eval(METHODS="vanilla pld", DATASTORE="/nowhere")
    assert done.returncode == 2
    assert refusal(done).startswith("error: DATASTORE: got /nowhere; only rest")


def test_a_draft_model_that_no_method_drafts_with_is_refused(tmp_path: Path) -> None:
    refused = refusal_of_compare(tmp_path, METHODS="vanilla pld", DRAFT_MODEL="/nowhere")
    assert refused.startswith("error: draft_model: got /nowhere; only sps")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("RUNS", value) for value in ("0", "-1", "2.5", "two", "1 2")),
        *(("BATCH_SIZE", value) for value in ("0", "two")),
    ],
)
def test_a_number_that_is_none_is_refused(name: str, value: str, tmp_path: Path) -> None:
    refused = refusal_of_compare(tmp_path, METHODS="vanilla", **{name: value})
    option = name.lower().replace("_", "-")
    assert refused.startswith((f"error: {name.lower()}: got", f"error: argument --{option}"))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        *(("OVERWRITE", value, "allowed: 1, or 0") for value in ("yes", "true", "2")),
        ("ALLOW_PICKLE", "2", "allowed: 1, or 0"),
        *(("GRAPHS", value, "allowed: auto, off") for value in ("on", "1", "auto off")),
        ("REPORT", "/nowhere/report.html", "an existing, writable folder"),
        ("REPORT", "/", "an existing, writable folder"),
        ("BENCH", "  ", "got no name"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_runs(name: str, value: str, says: str) -> None:
    done = run_eval(METHODS="vanilla", MAX_NEW_TOKENS="1", **{name: value})
    assert done.returncode == 2
    assert refusal(done).startswith(f"error: {name}: got")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "how_long"),
    [
        ({}, "2 to 4 minutes on two CPU cores, after the first set-up"),
        ({"METHODS": "all"}, "3 to 8 minutes on two CPU cores"),
        ({"METHODS": "vanilla"}, "the progress bar shows the time that is left"),
        ({"RUNS": "3"}, "the progress bar shows the time that is left"),
    ],
)
def test_the_first_line_says_what_is_done_and_for_how_long(
    given: dict[str, str], how_long: str, tmp_path: Path
) -> None:
    done = run_without_commands(tmp_path, **{"METHODS": "", "DEVICES": "cpu", **given})
    first, *others = done.stderr.splitlines()
    assert first.startswith("eval.sh: methods answer the same questions (demo) in turn")
    assert first.endswith(f"; {how_long}")
    assert any(line.startswith("methods: vanilla") for line in others)


def test_every_benchmark_is_there_before_the_first_is_answered() -> None:
    done = run_eval(METHODS="vanilla", MAX_NEW_TOKENS="1", BENCH="demo nosuch")
    assert done.returncode == 2
    assert "nosuch" in refusal(done)


def test_a_model_name_that_is_not_known_is_refused(tmp_path: Path) -> None:
    commands = commands_of(tmp_path, MODEL_PATH="nosuch", DEVICES="cpu")
    assert next(iter(commands)) == "download_model", "before any method runs"
    with pytest.raises(UserError, match="model: got 'nosuch'; allowed: smollm2-135m, gemma3-270m;"):
        download_model.main(commands["download_model"])


def test_without_a_compiler_the_default_leaves_out_what_needs_one(tmp_path: Path) -> None:
    done = run_eval(BENCH="nosuch", **no_compiler(tmp_path))
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("METHODS: ")]
    assert len(said) == 1
    assert said[0].startswith("METHODS: recycling-auto and hybrid are left out: ")
    assert "no C++ compiler: got no-such-compiler; install g++" in said[0]
    assert "nosuch" in done.stderr, "it should have gone on to the questions"


def test_in_batches_all_methods_are_without_those_that_start_cold() -> None:
    done = run_eval(METHODS="all", BENCH="nosuch", BATCH_SIZE="2")
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("METHODS: ")]
    assert said == ["METHODS: left out with BATCH_SIZE, since it starts cold: goose"]


def test_without_a_compiler_a_method_that_was_given_is_refused(tmp_path: Path) -> None:
    done = run_eval(METHODS="hybrid vanilla", **no_compiler(tmp_path))
    assert done.returncode == 2
    assert "left out" not in done.stderr
    assert "install g++" in refusal(done)


def test_settings_reach_the_commands(tmp_path: Path) -> None:
    given = {"GRAPHS": "off", "ALLOW_PICKLE": "1", "DTYPE": "bfloat16", "DEVICES": "cpu"}
    commands = commands_of(tmp_path, **given)
    assert commands.keys() == {"compare", "equal", "leaderboard"}
    for name in ("compare", "equal"):
        words = " ".join(commands[name])
        assert "--allow-pickle" in words and "--device cpu" in words, name
    assert "--graphs off" in " ".join(commands["compare"])


def test_settings_that_are_not_given_reach_no_command(tmp_path: Path) -> None:
    commands = commands_of(tmp_path, DTYPE="bfloat16")
    for name in ("compare", "equal"):
        assert {"--allow-pickle", "--device"}.isdisjoint(commands[name])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpus_that_are_not_there_are_refused(tmp_path: Path) -> None:
    assert "device: got 'cuda'" in refusal_of_compare(tmp_path, METHODS="vanilla", DEVICES="0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU that torch can use")
def test_a_gpu_that_torch_cannot_use_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 470.82.01\n")
    smi.chmod(0o755)
    machine = {"CUDA_VISIBLE_DEVICES": "0", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = run_eval(METHODS="vanilla", BENCH="nosuch", **machine)
    assert done.returncode == 2
    assert "(driver 470.82.01)" in refusal(done) and "DEVICES=cpu" in refusal(done)
    said = [line.partition(":")[0] for line in done.stderr.splitlines()]
    assert said == ["eval.sh", "methods", "error"]
    done = run_eval(METHODS="vanilla", BENCH="nosuch", DEVICES="cpu", **machine)
    assert "nosuch" in refusal(done), "it should have gone on to the questions"


def test_there_are_shell_files() -> None:
    assert {"eval.sh", "setup.sh", "test.sh"} <= {file.name for file in SCRIPTS}


@pytest.mark.parametrize("given", [[], ["old"], ["latest"]])
def test_a_version_of_transformers_that_is_none_is_refused_first(given: list[str]) -> None:
    command = ["bash", str(ROOT / "scripts/test.sh"), "--transformers", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    got = "".join(given)
    assert done.stderr.startswith(
        f"error: --transformers: got '{got}'; allowed: oldest, newest, or"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("given", ["", "nope", "openai nope"])
def test_a_client_that_is_none_is_refused_before_anything_is_set_up(given: str) -> None:
    command = ["bash", str(ROOT / "scripts/clients.sh"), *given.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert (
        f"error: clients: got '{given.split()[-1] if given else 'none'}'; allowed: all"
        in done.stderr
    )


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_shell_files_parse_and_stop_at_the_first_failure(file: Path) -> None:
    done = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = file.read_text(encoding="utf-8")
    is_sourced = not text.startswith("#!")
    assert is_sourced or "set -euo pipefail" in text, f"{file.name} would go on after a failure"
    assert "/home/" not in text, f"{file.name} has a personal path"
