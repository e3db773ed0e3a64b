"""Rules of imports that pyproject.toml cannot say: doors, circles, and who may import what is not ours.

All imports count: those inside functions and under TYPE_CHECKING too. What imports what between the
packages is held by `lint-imports` (`[tool.importlinter]` in pyproject.toml).

Run: pytest tests/test_import_rules.py
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("model", "evaluation", "scripts")
# All contact of the library with transformers.
WITH_TRANSFORMERS = {
    *(
        "model.backends.target",
        "model.backends.passes.cache",
        "model.backends.proofs.snapshot",
        "model.backends.proofs.support",
        "model.engine.rules",
    ),
    *(
        "model.backends.passes.layout",
        "model.backends.passes.packed",
        "model.backends.passes.slots",
    ),
    *("model.backends.proofs.plain_decoding", "model.backends.passes.loaded_model"),
    *("model.backends.states.layers", "model.backends.states.scans"),
    *("model.serve.reply", "model.api.tools"),
    *("model.backends.passes.static_cache", "model.backends.graphs.graphed_target"),
    *("model.kernels.attention", "model.kernels.registered_attention"),
    *("model.backends.programs.layers", "model.backends.programs.run"),
    *("model.methods.sps.drafter", "model.methods.heads.mtp.guesser"),
    *("model.api.decoder", "model.api.accelerate", "model.api.speculative_method"),
    *("model.api.generate_arguments", "model.api.prepared_call"),
    *(
        "model.api.loading.gguf_config",
        "model.api.loading.gguf_tokenizer",
        "model.api.loading.quantised_gguf",
        "model.api.loading.models",
        "model.api.loading.weights",
    ),
    *("model.api.prompts", "model.api.text_options"),
    "model.commands.loading",
}

# What of the library is for command lines.
COMMANDS = {"__main__.py", "build.py", "chat", "commands", "doctor.py", "generate.py", "serve"}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """All modules, and what each imports."""
    return grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)


def importers(graph: grimp.ImportGraph, module: str, package: str = "") -> set[str]:
    """The modules of a package that import this one."""
    return {
        name
        for name in graph.find_modules_that_directly_import(module)
        if f"{name}.".startswith(package)
    }


def test_every_folder_of_the_harness_is_a_room() -> None:
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    _, _, contract = settings.partition('name = "the packages of the harness"')
    (layers,) = re.findall(r"^layers = \[(.*)\]$", contract, re.MULTILINE)
    folders = {file.parent.name for file in (ROOT / "evaluation").glob("*/__init__.py")}
    assert folders == {*re.findall(r"\w+", layers)}


@pytest.mark.parametrize("command", ["speed", "leaderboard", "defects"])
def test_a_report_opens_without_torch(command: str) -> None:
    code = f"import sys, evaluation.{command}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_no_one_imports_a_door_of_the_harness(graph: grimp.ImportGraph) -> None:
    doors = {f"evaluation.{file.stem}" for file in (ROOT / "evaluation").glob("[!_]*.py")}
    assert {"evaluation.speed", "evaluation.inference_pld"} <= doors
    found = {(name, door) for door in doors for name in importers(graph, door, "evaluation.")}
    assert not found


def test_no_imports_go_in_a_circle(graph: grimp.ImportGraph) -> None:
    ours = {name for name in graph.modules if name.partition(".")[0] in PACKAGES}
    imports = {name: graph.find_modules_directly_imported_by(name) & ours for name in ours}
    graphlib.TopologicalSorter(imports).prepare()


def test_transformers_is_imported_by_these_files_of_the_library_alone(
    graph: grimp.ImportGraph,
) -> None:
    assert importers(graph, "transformers", "model.") == WITH_TRANSFORMERS


def test_only_commands_of_the_library_parse_arguments(graph: grimp.ImportGraph) -> None:
    packages = {name.split(".")[1] for name in importers(graph, "argparse", "model.")}
    assert packages == {"chat", "commands"}


@pytest.mark.parametrize("package", ["fastapi", "starlette", "uvicorn", "prometheus_client"])
def test_packages_of_the_server_are_imported_by_its_room_alone(
    graph: grimp.ImportGraph, package: str
) -> None:
    assert all(name.startswith("model.serve.") for name in importers(graph, package))


def test_answers_and_the_server_check_objects_with_pydantic(graph: grimp.ImportGraph) -> None:
    packages = {".".join(name.split(".")[:2]) for name in importers(graph, "pydantic")}
    assert packages == {"model.serve", "evaluation.answers"}


def test_progress_bars_come_from_one_place(graph: grimp.ImportGraph) -> None:
    assert {name for name in graph.find_modules_that_directly_import("tqdm")} == {
        "model.machine.timing"
    }


def test_commands_of_the_library_alone_print() -> None:
    printing = {
        file.relative_to(ROOT / "model").parts[0]
        for file in (ROOT / "model").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    }
    assert printing == {*COMMANDS}


def test_errors_of_the_library_name_no_flag_of_a_command() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{constant.lineno}: {constant.value}"
        for file in (ROOT / "model").rglob("*.py")
        if file.relative_to(ROOT / "model").parts[0] not in COMMANDS
        for constant in _texts(ast.parse(file.read_text(encoding="utf-8")))
        if re.search(r"(?<!\S|/)\(?--[a-z]", constant.value)
    ]
    assert found == []


def _texts(tree: ast.AST) -> Iterator[ast.Constant]:
    """Texts of a module, without docstrings and the help of options."""
    for node in ast.iter_child_nodes(tree):
        is_help = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "option"
        if (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) or is_help:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node
        yield from _texts(node)
