"""What contributors are told is so: targets of the Makefile, workflows, hooks and forms name what is there.

Workflows do not run here: each of their lines is a target of the Makefile, or a command of CONTRIBUTING.md.

Run: pytest tests/test_contributing.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TARGETS = dict(
    re.findall(
        r"^(\w+): ##.*\n\t(.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
)


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    """The jobs of all workflows, by name."""
    for file in WORKFLOWS:
        yield from yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"].items()


def lines_of(job: dict[str, Any]) -> Iterator[str]:
    """The commands of a job, one for each value of its matrix."""
    for step in job["steps"]:
        line = step.get("run", "")
        values = job.get("strategy", {}).get("matrix", {})
        for name in re.findall(r"\$\{\{ matrix\.(\w+) \}\}", line):
            yield from (line.replace(f"${{{{ matrix.{name} }}}}", value) for value in values[name])
            break
        else:
            yield from filter(None, [line])


def test_each_target_is_one_line_of_what_is_there() -> None:
    assert {*TARGETS} == {"setup", "quick", "test", "docs", "demo", "package"}
    for target, line in TARGETS.items():
        shell, script, *_ = line.split()
        assert shell == "bash" and (ROOT / script).is_file()
        assert f"make {target}" in GUIDE


@pytest.mark.parametrize(("name", "job"), [*jobs()])
def test_a_workflow_runs_commands_of_the_guide_alone(name: str, job: dict[str, Any]) -> None:
    lines = [*lines_of(job)]
    assert lines and "timeout-minutes" in job
    for line in lines:
        known = {f"make {target}" for target in TARGETS}
        documented = line.replace("--transformers newest", "--transformers oldest")
        assert line in known or f"`{documented}`" in GUIDE, f"{name}: {line}"


def test_tests_run_on_every_version_of_python_that_is_promised() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    promised = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    oldest, tested = (dict(jobs())[name]["strategy"]["matrix"] for name in ("oldest", "tests"))
    assert [*oldest["python"], *tested["python"]] == promised
    assert f'requires-python = ">={promised[0]}"' in project


def test_hooks_have_the_versions_of_the_tests() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = {hook["id"]: hook for repo in config["repos"] for hook in repo["hooks"]}
    assert {*hooks} == {"ruff", "format", "types", "large-files", "typos"}
    wanted = (ROOT / "requirements-test.txt").read_text(encoding="utf-8").splitlines()
    ruff = next(line for line in wanted if line.startswith("ruff=="))
    assert hooks["ruff"]["additional_dependencies"] == [ruff]
    assert hooks["format"]["additional_dependencies"] == [ruff]
    script = (ROOT / "scripts/test.sh").read_text(encoding="utf-8")
    assert hooks["types"]["entry"] == "bash scripts/test.sh --lint" and "= --lint ]" in script


def test_the_form_asks_for_what_the_doctor_says() -> None:
    forms = {
        file.stem: yaml.safe_load(file.read_text(encoding="utf-8"))
        for file in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")
    }
    assert {*forms} == {"config", "mistake", "method"}
    asked = [part["attributes"].get("label", "") for part in forms["mistake"]["body"]]
    assert any("token-recycling doctor --json" in label for label in asked)
