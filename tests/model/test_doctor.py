"""The doctor: it names what is here, what is chosen, and what to do about what is missing; it never fails.

Run: pytest tests/model/test_doctor.py
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from model import doctor
from model.api.defaults import default_choice
from model.commands.command_line import UserError
from model.doctor import Finding
from model.kernels.short_pass import short_pass_kernel
from model.machine import hardware, packages
from model.methods.hybrid.candidate_pool import library_of_pool

CPU = torch.device("cpu")
needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 reads no TOML")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU."""
    monkeypatch.setattr(doctor, "auto_device", lambda: "cpu")


def found() -> dict[str, list[Finding]]:
    """All findings by name."""
    everything: dict[str, list[Finding]] = {}
    for finding in doctor.findings():
        everything.setdefault(finding.name, []).append(finding)
    return everything


@needs_toml
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.skipif(short_pass_kernel() is None, reason="no compiler, or another processor")
def test_a_line_for_each_thing_and_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run([]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert doctor.run(["--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["versions"] == packages.versions()
    names = [finding["name"] for finding in said["findings"]]
    assert [line[: doctor.INDENT - 1].rstrip() for line in lines] == names
    asked = packages.requirements()
    needed = [each.name for each in asked.pop("")]
    extras = [f"[{extra}]" for extra in asked]
    assert set(doctor.EXTRAS) == set(asked)
    assert {"python", "library", *needed, *extras, *["device", "dtype", "threads", "memory"]} < {
        *names
    }
    advice = {finding["name"]: finding["advice"] for finding in said["findings"]}
    assert not any(advice[name] for name in (*needed, "device", "dtype", "compiler", "C++"))
    lines_of = {line.split()[0]: line for line in lines}
    assert f"torch         {torch.__version__}; allowed: >=" in lines_of["torch"]
    assert lines_of["dtype"].split()[1:4] == ["float32", "on", "cpu"]
    assert lines_of["method"].split()[1] == default_choice(CPU).method
    assert lines_of["threads"].split()[1] == str(torch.get_num_threads())


@needs_toml
def test_versions_that_do_not_fit_are_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = {"transformers": "5.99.0", "torch": None, "gguf": "0.5"}
    true_version = doctor.installed_version
    monkeypatch.setattr(
        doctor, "installed_version", lambda name: versions.get(name, true_version(name))
    )
    of = {finding.name: finding for finding in doctor._packages()}
    transformers = next(each for each in packages.requirements()[""] if each.name == "transformers")
    assert of["transformers"].found.startswith("5.99.0; allowed: >=")
    (wanted,) = re.findall(r"^pip install 'transformers(\S+)'$", of["transformers"].advice)
    assert {*wanted.split(",")} == {*map(str, transformers.specifier)}
    assert of["torch"].found.startswith("not installed; allowed: >=")
    assert of["torch"].advice.startswith("pip install 'torch>=")
    assert "not in this version: gguf" in of["[gguf]"].found
    assert of["[gguf]"].advice.startswith("for models in GGUF files: pip install 'gguf>=")
    assert not of["numpy"].advice


@pytest.mark.usefixtures("on_cpu")
def test_without_a_compiler_it_says_what_that_costs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "get_cxx_compiler", lambda: "no-such-compiler")
    library_of_pool.cache_clear()
    try:
        everything = found()
    finally:
        library_of_pool.cache_clear()
    assert everything["compiler"] == [
        Finding("compiler", "no-such-compiler is not here", "install g++, or name one as CXX")
    ]
    *_, hybrid, recycling = everything["C++"]
    for finding in (hybrid, recycling):
        assert ": not built: no C++ compiler: got no-such-compiler" in finding.found
        assert "python -m model.build" in finding.advice
    (method,) = everything["method"]
    assert method.found.startswith("pld where none is named: pld instead of hybrid: ")


def test_a_gpu_that_torch_cannot_use_comes_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise UserError("device: install a torch built for that driver")

    monkeypatch.setattr(doctor, "auto_device", refuse)
    (finding,) = doctor._device()
    assert finding.advice == "device: install a torch built for that driver"
    assert next(doctor._dtype()).found.startswith("float32 on cpu")


def test_a_gpu_is_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "auto_device", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Card {index}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (3 * 2**30, 2**32))
    assert [each.found for each in doctor._device()] == ["cuda:0 (Card 0)", "cuda:1 (Card 1)"]
    assert next(doctor._dtype()).found == "float16 on cuda by default"
    assert [each.found for each in doctor._memory()][-1] == "cuda:1: 3.0 GiB free of 4.0"
    assert next(doctor._method()).found.startswith(
        "recycling-averaged where none is named: on a GPU"
    )


def test_a_broken_installation_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    everything = found()
    for name in ("device", "dtype", "threads", "processor"):
        (finding,) = everything[name]
        assert finding.found.startswith("cannot be told: ModuleNotFoundError: ")
    assert {"python", "library", "model"} <= {*everything}
    assert packages.versions()["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_threads_and_huge_pages_that_are_not_there_come_with_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4096)
    assert next(doctor._threads()).advice.startswith("--threads ")
    monkeypatch.setattr(hardware, "COLLAPSE", -1)  # as on an older Linux
    assert not hardware.huge_pages_are_possible()
    assert "Linux 6.1" in next(doctor._huge_pages()).advice


def test_it_starts_without_torch() -> None:
    """Where torch does not even import, it can say so."""
    code = "import sys, model.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
