"""The methods of docs/adding-a-method.md, from its text: their tokens, memory, hidden states, trees and title.

tests/test_recipe.py follows the page's first method in a copy of the checkout.

Run: pytest tests/evaluation/inference/test_guide.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation import leaderboard
from evaluation.reporting.titles import options_text
from model.engine.drafter import Drafter, VerifiedStep
from model.engine.loop import generate
from model.engine.step import Generation
from model.methods import find_method
from tests.evaluation.conftest import (
    ROOT,
    cut_after,
    figures,
    read_meta,
    read_rows,
    run,
    write_rows,
)
from tests.model.decoded import random_ids, target_of

PAGE = ROOT / "docs" / "adding-a-method.md"
PACKAGE = "my_methods"
FILE = re.compile(rf"^```python\n# ({PACKAGE}/\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MEMORY, STATES, TRIE = (
    f"{PACKAGE}.{name}:{name.title()}Drafter" for name in ("memory", "states", "trie")
)
LLAMA, CHAINS_ONLY = "Llama, grouped heads", "BLOOM"
PROMPTS = [random_ids(20, seed=seed) for seed in (1, 2)]
STEPS = ("token_ids", "accept_lengths")


def forget() -> None:
    """Forget the package's modules, as another process has not imported them."""
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's package, where Python finds it; return the folder that it is in."""
    files = FILE.findall(PAGE.read_text(encoding="utf-8"))
    assert {name for name, _ in files} == {
        f"{PACKAGE}/{name}.py" for name in ("__init__", "memory", "states", "trie")
    }
    for name, text in files:
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(text, encoding="utf-8")
    with monkeypatch.context() as patched:
        patched.syspath_prepend(tmp_path / "site")
        yield tmp_path / "site"
    forget()


def drafter_of(name: str, family: str = LLAMA, **options: Any) -> Drafter:
    """Return a fresh drafter of a method for the shared model of a family."""
    cls, target = find_method(name).drafter_class, target_of(family)
    drafter = cls(cls.config_class(**options), target.vocab_size, target.device)
    drafter.check_target(target)
    return drafter


def answers(drafter: Drafter, family: str = LLAMA) -> list[Generation]:
    """Return a drafter's answers to both prompts, one after the other."""
    target = target_of(family)
    return [generate(target, drafter, prompt, max_new_tokens=60) for prompt in PROMPTS]


@pytest.mark.parametrize("family", [LLAMA, CHAINS_ONLY])
@pytest.mark.parametrize("method", [MEMORY, STATES, TRIE])
def test_the_tokens_are_those_of_plain_decoding(method: str, family: str) -> None:
    found, plain = (answers(drafter_of(name, family), family) for name in (method, "vanilla"))
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
    assert max(length for answer in found for length in answer.accept_lengths) > 1


def test_a_memory_is_saved_loaded_and_forgotten() -> None:
    used, heir, fresh = (drafter_of(MEMORY) for _ in range(3))
    first = answers(used)
    taken = used.memory()
    heir.load_memory(taken)
    expected, found = answers(used), answers(heir)
    assert [a.accept_lengths for a in found] == [a.accept_lengths for a in expected]
    assert [a.accept_lengths for a in found] != [a.accept_lengths for a in first], "it has learned"
    heir.reset()
    assert torch.equal(heir.memory()["next"], fresh.memory()["next"])
    for wrong in ({}, {"next": taken["next"][1:]}, {"next": taken["next"] + 10**6}):
        with pytest.raises(ValueError, match="memory: got"):
            fresh.load_memory(wrong)


def test_a_broken_off_run_goes_on_with_its_memory(tiny_model: Path, tmp_path: Path) -> None:
    row = {"category": "qa", "turns": ["What is 7 times 7?"]}
    asked = write_rows(tmp_path / "asked.jsonl", [{"question_id": n} | row for n in range(3)])
    options = ["--model-path", tiny_model, "--question-file", asked]
    options += ["--threads", "1", "--warmup", "0", "--max-new-tokens", "16"]
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert run(MEMORY, options, whole) == 0
    with cut_after(1):
        run(MEMORY, options, cut)
    assert len(read_rows(cut)) == 1
    assert run(MEMORY, options, cut) == 0
    found = figures(read_rows(cut), *STEPS)
    assert found == figures(read_rows(whole), *STEPS)
    first, second, _ = figures(read_rows(cut), "decoding_steps").values()
    assert first > second, "equal questions take fewer steps with a memory"


def test_hidden_states_are_those_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, size = drafter_of(STATES), target_of(LLAMA).config.hidden_size
    observe, steps = type(drafter).observe, []

    def seen(self: Drafter, step: VerifiedStep) -> None:
        steps.append(step)
        observe(self, step)

    monkeypatch.setattr(type(drafter), "observe", seen)
    answers(drafter)
    for step in steps:
        assert step.hidden is not None
        assert step.hidden.shape == (step.tree.topology.num_nodes, size)
        assert step.hidden[step.acceptance.path].shape == (len(step.acceptance.path), size)


def test_the_trie_drafts_trees_and_chains_where_only_they_are_verified() -> None:
    for family, is_chain in ((LLAMA, False), (CHAINS_ONLY, True)):
        records = [
            record
            for answer in answers(drafter_of(TRIE, family), family)
            for record in answer.steps
        ]
        assert all(record.tree.topology.is_chain for record in records) == is_chain


def test_a_title_without_an_entry_point_is_in_the_tables(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "vanilla.jsonl", tmp_path / "memory.jsonl"]
    for method, file in zip(("vanilla", MEMORY), files, strict=True):
        assert run(method, [*options, "--question-end", "2"], file) == 0
    assert options_text({"length": 4}, MEMORY) == "4 guesses a step"
    assert read_meta(files[1])["method_title"] == "Last successors"
    assert "method_title" not in read_meta(files[0])
    forget()  # a report is often made by another process
    assert leaderboard.main([str(file) for file in files]) == 0
    assert PACKAGE not in sys.modules, "a file of answers makes nobody import a module"
    table = capsys.readouterr().out
    assert "Last successors" in table
