"""Says what is on this machine, what the library will use of it, and what to do about what is missing.

It loads a model only to check it. C++ that is not built yet is built, as at its first use.

Run:
    python -m model.doctor
    python -m model.doctor --json
    python -m model.doctor --check data/demo/model --dtype bfloat16
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from packaging.requirements import Requirement

from . import __version__
from .build import libraries
from .commands.command_line import (
    OptionParser,
    UserError,
    add_options,
    command_of,
    config_of,
    first_line,
    run_command,
)
from .commands.model_options import (
    DEFAULT_MODEL,
    KNOWN_MODELS,
    MODEL_PATHS,
    MODELS_FOLDER,
    ModelOptions,
    auto_device,
    default_dtype,
)
from .machine.files import BuildError
from .machine.packages import NAME, installed_version, requirements, versions

if TYPE_CHECKING:
    import torch

COMMAND = command_of("doctor")
EXAMPLES = f"""\
examples:
  {COMMAND}

  # for a report of a mistake, or for a program
  {COMMAND} --json

  # whether this machine decodes a model without loss, in half precision too
  {COMMAND} --check MODEL --dtype bfloat16

exit code: 0; with --check 1 if a row or a state depends on drafts
"""
# Options of a model that is checked.
CHECKED = ("dtype", "device", "threads", "trust_remote_code", "allow_pickle")
# What each extra is for.
EXTRAS = {
    "harness": "the harness of a checkout (compare, reports)",
    "endpoint": "servers as participants of a comparison",
    "ray": "workers over several GPUs or machines",
    "big": "one model over several GPUs",
    "gguf": "models in GGUF files",
    "torchao": "models that torchao quantised",
    "llama-cpp": "llama.cpp as a participant of a comparison",
    "openvino": "OpenVINO GenAI as a participant of a comparison",
    "ctranslate2": "CTranslate2 as a participant of a comparison",
    "serve": "serving OpenAI's clients",
    "grammar": "texts that obey a JSON schema or a grammar",
}
MEMORY = Path("/proc/meminfo")
GIB = 2**30
INDENT = 14  # columns of the names


class Finding(NamedTuple):
    """One thing that was looked at: its name, what is there, and what to do about it; "" if nothing."""

    name: str
    found: str
    advice: str = ""

    def __str__(self) -> str:
        """Return a line, and one more with the advice."""
        advice = f"\n{'':{INDENT}}-> {self.advice}" if self.advice else ""
        return f"{self.name:{INDENT - 1}} {self.found}{advice}"


def run(argv: Sequence[str] | None = None) -> int:
    """Print what is found; return 0, or 1 if a checked model is not as it should be."""
    parser = OptionParser(
        prog=COMMAND,
        description="Show what this machine has, what the library will use, and what to do about "
        "missing parts.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object: versions, as in the record of a run, and findings (name, found, advice)",
    )
    parser.add_argument(
        "--check",
        metavar="MODEL",
        help="load this model instead, run its self-test, and compare rows and states with and "
        "without drafts, bit by bit",
    )
    add_options(parser.add_argument_group("with --check"), ModelOptions, CHECKED)
    given = vars(parser.parse_args(argv))
    model, as_json = given["check"], given["json"]
    if model is None and (idle := [name for name in CHECKED if name in given]):
        raise UserError(f"{idle[0]}: got it without --check; give --check MODEL, or leave it out")
    found = []
    for finding in findings() if model is None else _check(given | {"model_path": model}):
        found.append(finding)
        if not as_json:
            print(finding, flush=True)
    if as_json:
        told = {"versions": versions(), "findings": [each._asdict() for each in found]}
        print(json.dumps(told, indent=2))
    return int(model is not None and any(finding.advice for finding in found))


def _check(given: Mapping[str, object]) -> Iterator[Finding]:
    from .commands.model_check import check  # torch takes a second

    for name, said, is_right in check(config_of(ModelOptions, given)):
        advice = "" if is_right else "near-ties may be decided otherwise with drafts than without"
        yield Finding(name, said, advice)


def findings() -> Iterator[Finding]:
    """Look at one thing after the other."""
    looks: dict[str, Callable[[], Iterator[Finding]]] = {
        "library": _library,
        "packages": _packages,
        "device": _device,
        "dtype": _dtype,
        "memory": _memory,
        "threads": _threads,
        "processor": _processor,
        "huge pages": _huge_pages,
        "compiler": _compiler,
        "C++": _libraries,
        "method": _method,
        "model": _model,
    }
    for name, look in looks.items():
        try:
            yield from look()
        except Exception as error:  # a broken installation, which is what is asked about
            yield Finding(name, f"cannot be told: {type(error).__name__}: {first_line(error)}")


def _library() -> Iterator[Finding]:
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    yield Finding("library", f"{NAME} {__version__} in {Path(__file__).parent}")


def _packages() -> Iterator[Finding]:
    wanted = requirements()
    for requirement in wanted.pop(""):
        version, allowed = installed_version(requirement.name), _range(requirement)
        found = f"{version or 'not installed'}; allowed: {allowed}"
        yield Finding(requirement.name, found, "" if _fits(requirement) else _pip([requirement]))
    for extra, packages in wanted.items():
        there = [f"{each.name} {installed_version(each.name)}" for each in packages if _fits(each)]
        if missing := [each for each in packages if not _fits(each)]:
            names = ", ".join(each.name for each in missing)
            advice = f"for {EXTRAS[extra]}: {_pip(missing)}"
            yield Finding(f"[{extra}]", f"not installed, or not in this version: {names}", advice)
        else:
            yield Finding(f"[{extra}]", ", ".join(there))


def _range(requirement: Requirement) -> str:
    """Return the allowed versions, the least first: ">=2.11,<2.14"."""
    return ",".join(sorted(map(str, requirement.specifier), reverse=True))


def _fits(requirement: Requirement) -> bool:
    version = installed_version(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def _pip(packages: Sequence[Requirement]) -> str:
    return shlex.join(["pip", "install", *(each.name + _range(each) for each in packages)])


def _chosen_device() -> torch.device:
    """Return the device `auto`, the CPU beside a GPU that torch cannot use."""
    import torch

    try:
        return torch.device(auto_device())
    except UserError:
        return torch.device("cpu")


def _device() -> Iterator[Finding]:
    import torch

    from .machine.hardware import device_name, machine_name

    try:
        device = torch.device(auto_device())
    except UserError as error:
        yield Finding("device", "a GPU that torch cannot use", str(error))
        return
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            yield Finding("device", f"cuda:{index} ({torch.cuda.get_device_name(index)})")
        return
    others = " (mps is here too: --device mps)" if torch.backends.mps.is_available() else ""
    yield Finding("device", device_name(device) + others)
    yield Finding("machine", machine_name())


def _dtype() -> Iterator[Finding]:
    device = _chosen_device()
    name = str(default_dtype(device)).removeprefix("torch.")
    half = "; --dtype bfloat16 reads half as many bytes" if device.type == "cpu" else ""
    yield Finding("dtype", f"{name} on {device.type} by default{half}")


def _memory() -> Iterator[Finding]:
    import torch

    lines = MEMORY.read_text().splitlines() if MEMORY.exists() else []
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if "kB" in line}
    if sizes:
        free, total = sizes["MemAvailable"] / GIB, sizes["MemTotal"] / GIB
        yield Finding("memory", f"{free:.1f} GiB free of {total:.1f}")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = (size / GIB for size in torch.cuda.mem_get_info(index))
        yield Finding("memory", f"cuda:{index}: {free:.1f} GiB free of {total:.1f}")


def _threads() -> Iterator[Finding]:
    import torch

    number = torch.get_num_threads()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    too_many = usable is not None and number > usable
    advice = f"--threads {usable}: more threads than processors wait for each other"
    yield Finding("threads", f"{number} on {usable} processors", advice if too_many else "")


def _processor() -> Iterator[Finding]:
    import torch

    from .kernels.short_pass import this_kind

    capability, has_units = this_kind()
    units = "with" if has_units else "without"
    tiles = ", AMX" if torch.cpu._is_amx_tile_supported() else ""
    yield Finding("processor", f"{capability}, {units} units for bfloat16{tiles}")


def _huge_pages() -> Iterator[Finding]:
    from .machine.hardware import huge_pages_are_possible

    none = ("none, so that weights are read more slowly", "Linux 6.1 or newer has them")
    yield Finding("huge pages", *(["weights lie in them"] if huge_pages_are_possible() else none))


def _compiler() -> Iterator[Finding]:
    from torch.utils import cpp_extension

    compiler = cpp_extension.get_cxx_compiler()
    if not shutil.which(compiler):
        yield Finding("compiler", f"{compiler} is not here", "install g++, or name one as CXX")
        return
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    yield Finding("compiler", f"{compiler}: {(said.stdout.splitlines() or ['of no version'])[0]}")


def _libraries() -> Iterator[Finding]:
    from .kernels.short_pass import UnsupportedProcessorError

    for what, library in libraries().items():
        try:
            yield Finding("C++", f"{what}: built, {library()}")
        except UnsupportedProcessorError as error:
            yield Finding("C++", f"{what}: torch's own instead, since {error}")
        except (BuildError, ImportError, OSError) as error:
            advice = f"mend this, then {command_of('build')}; until then passes are slower, and hybrid is refused"
            yield Finding("C++", f"{what}: not built: {first_line(error)}", advice)


def _method() -> Iterator[Finding]:
    from .api.defaults import default_choice

    choice = default_choice(_chosen_device())
    yield Finding("method", f"{choice.method} where none is named: {choice.why}")


def _model() -> Iterator[Finding]:
    here = [name for name in KNOWN_MODELS if (MODELS_FOLDER / name).is_dir()]
    if DEFAULT_MODEL:
        yield Finding("model", ", ".join([f"{DEFAULT_MODEL} by default", *here]))
    else:
        advice = f"give --model-path: {MODEL_PATHS}"
        yield Finding("model", "none comes with the installed package", advice)


if __name__ == "__main__":
    run_command(run)
