"""Fixtures of all tests.

Costs of a step are measured on the device in a real run. Here they are given, so that no test
depends on the clock, and measured ones go to a temporary folder. Random numbers are the same at every run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from traceback import StackSummary, format_list
from types import SimpleNamespace
from zlib import crc32

import pytest
import torch
from hypothesis import HealthCheck, settings

from model.budget.cost_model import CostModel
from model.commands.command_line import LIBRARY, NOTING
from tests.hang import HANG
from tests.simulated_device.given_costs import NEARLY_FLAT, GivenCosts

TESTS = Path(__file__).parent
# Kernels for a GPU run by an interpreter where there is none; read when Triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# What the markers `quick` and `slow` name: files and folders of tests.
QUICK = (
    # loop, trees, verification, cache; every method once on one family, with its laws
    *("model/engine/test_loop.py", "model/engine/test_drafter.py", "model/engine/test_tree.py"),
    *("model/engine/test_verification.py", "model/backends/passes/test_cache.py"),
    *("model/budget/test_switch.py", "model/budget/test_device_speed.py", "model/machine"),
    *("model/budget/test_best_first.py", "model/budget/test_backoff.py"),
    *("model/budget/test_chain_acceptance.py", "model/methods/test_pld.py"),
    *("model/methods/recycling/test_drafter.py", "model/methods/recycling/test_tree_template.py"),
    # options and reports
    *("model/test_options.py", "evaluation/inference/test_command.py", "evaluation/scoring"),
    *("evaluation/reporting/test_speed.py", "evaluation/reporting/test_latex.py"),
    *("evaluation/reporting/test_titles.py", "evaluation/questions"),
    *("evaluation/answers/test_answer_file.py", "evaluation/answers/test_record.py"),
    "evaluation/answers/test_log.py",
)
SLOW = (
    # families and methods on a simulated GPU
    *("simulated_device/test_families.py", "simulated_device/test_graphed.py"),
    *("simulated_device/test_methods.py", "simulated_device/test_spread_model.py"),
    *("simulated_device/test_batches.py", "scripts/test_gpu_check.py"),
    # other processes
    *("evaluation/inference/test_kill_and_resume.py", "evaluation/inference/test_workers.py"),
    *("evaluation/inference/test_faults.py", "evaluation/inference/test_loading.py"),
    "evaluation/reporting/test_html_page.py",
    *("simulated_device/test_workers.py", "model/chat/test_chat_process.py"),
    "model/serve/test_command.py",
    *("test_package.py", "test_recipe.py", "test_shell.py"),
    # random cases, for a minute
    "fuzz",
    *("model/methods/test_other_packages.py", "examples"),
)
# What takes longest beside those. Both come first: none is left at the end alone.
LONG = (
    *("model/backends/fused", "scripts/results", "simulated_device/test_fused.py"),
    *("evaluation/checking", "evaluation/inference", "evaluation/replay"),
    *("evaluation/questions/test_known.py", "scripts/train_heads", "scripts/test_demo_model.py"),
    *("model/engine/test_near_ties.py", "model/engine/test_rules.py"),
    *("model/engine/test_long_context.py", "model/backends/proofs/test_kept_verdict.py"),
    "model/api/test_threads.py",
)
FIRST = (*SLOW, *LONG)
# A test with more cases than this is shared out by --part.
MOST_CASES = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run take one part of the cases of families, methods and options, and of what takes long."""
    parser.addoption(
        "--part",
        default=(1, 1),
        metavar="PART/PARTS",
        type=part_of,
        help="one of so many parts of each test's cases, and of the tests that take long (default: 1/1, all)",
    )


def part_of(text: str) -> tuple[int, int]:
    """Return which of how many parts a text such as "1/4" is."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError(f"--part: got {text}; allowed: PART/PARTS, such as 1/4")
    return int(part), int(parts)


def pytest_configure() -> None:
    """Check that the lists above name what is there, and let random examples take their time."""
    settings.register_profile(
        "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("patient")
    if gone := [place for place in (*QUICK, *FIRST) if not (TESTS / place).exists()]:
        raise pytest.UsageError(
            f"tests/conftest.py: got {gone}; allowed: files and folders of tests"
        )


@cache
def is_among(file: Path, places: tuple[str, ...]) -> bool:
    """Whether a file of tests is one of these, or in one of these folders."""
    place = file.relative_to(TESTS)
    return any(each in (place.as_posix(), *map(Path.as_posix, place.parents)) for each in places)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file for `-m quick` in which no test is."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    is_left_out = is_test and not is_among(collection_path, QUICK)
    return True if config.option.markexpr == "quick" and is_left_out else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep those of --part, give tests the markers of their files, and put those of long files first."""
    kept = shared_out(items, *config.getoption("--part"))
    config.hook.pytest_deselected(items=[*{*items} - {*kept}])
    items[:] = sorted(kept, key=lambda item: not is_among(item.path, FIRST))
    for item in items:
        for name, places in (("quick", QUICK), ("slow", SLOW)):
            if is_among(item.path, places):
                item.add_marker(name)


def shared_out(items: list[pytest.Item], part: int, parts: int) -> list[pytest.Item]:
    """Return the tests of one of so many parts: of a test's cases, or of one that takes long, every few.

    Each test begins with another case, so that what a part leaves out of one test is in others of it.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = set[pytest.Item]()
    for name, found in cases.items():
        first = (part + crc32(name.encode())) % parts
        is_shared = len(found) > MOST_CASES or is_among(found[0].path, FIRST)
        kept.update(found[first::parts] if is_shared else found)
    return [item for item in items if item in kept]


@pytest.fixture(autouse=True, scope="session")
def cost_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep measured costs, those of other processes included, out of the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path_factory.mktemp("costs")))
        yield


@pytest.fixture(autouse=True, scope="session")
def nothing_proved() -> Iterator[None]:
    """Let each test prove its models itself: some break what the proof is of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model.backends.proofs.self_test.verdict_key", lambda *_: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_hurry() -> Iterator[None]:
    """Let nothing of the library end, or say a word, because the machine is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model.api.permits.PATIENCE", HANG)
        patch.setattr("model.backends.proofs.self_test.SLOW_SECONDS", HANG)
        patch.setattr("model.machine.files.BUILD_SECONDS", HANG)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_stacks() -> Iterator[None]:
    """Let torch keep no stack of calls for each operation of a layer that it traces: 40% of a trace."""
    told = SimpleNamespace(extract_stack=StackSummary, format_list=format_list)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._subclasses.fake_tensor.traceback", told)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_unusable_gpu() -> Iterator[None]:
    """Run on the CPU, in other processes too, beside a GPU that torch cannot use: commands refuse it."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Begin every test with the same random numbers, whichever ran before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def quiet_library() -> Iterator[None]:
    """End every test with a library that shows no notes: a command shows them from then on in its process."""
    yield
    for package in NOTING:
        notes = logging.getLogger(f"{LIBRARY}.{package}")
        notes.handlers.clear()
        notes.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True, scope="session")
def given_costs() -> Iterator[None]:
    """Give every target model the same costs: nearly flat, as on a GPU, so that drafters with an
    automatic budget draft large trees. Other fixtures decode, too.
    """

    def costs(target: object) -> CostModel:
        return GivenCosts(*NEARLY_FLAT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model.budget.measure.read_or_measure", costs)
        yield
