"""Random cases: some always, and more for some seconds.

Run: pytest tests/fuzz/test_fuzz.py; for longer: python -m tests.fuzz --minutes N
"""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path

import pytest

from tests.fuzz.cases import Case
from tests.fuzz.running import Runner
from tests.fuzz.scene import Finding, Inapplicable
from tests.fuzz.surroundings import surroundings

SEED = 68
# So many cases run however long they take; then more are drawn for so many seconds.
FEWEST, SECONDS = 8, 20.0


def test_random_cases_are_transformers_own_texts(tmp_path: Path) -> None:
    begin, num_texts = time.monotonic(), 0
    with surroundings(str(tmp_path)):
        for number in count():
            if number >= FEWEST and time.monotonic() - begin > SECONDS:
                break
            runner = Runner(Case.drawn(SEED, number))
            try:
                runner.run()
            except Inapplicable:
                continue
            num_texts += sum(runner.counts.values())
    assert num_texts >= FEWEST


def test_a_case_is_the_same_for_the_same_numbers() -> None:
    for number in range(20):
        one, other = (Case.drawn(3, number) for _ in range(2))
        calls = [[case.call([1, 2, 3], 60, "abc") for _ in range(4)] for case in (one, other)]
        assert str(one) == str(other) and calls[0] == calls[1]
        assert f"--seed 3 --case {number}" in one.command


def test_a_wrong_text_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Within the first cases, a decoder whose greedy texts end in another token is noticed."""

    def wrong(self: Runner, call: object) -> list[list[int]]:
        return [[*self.decoder.generate([5, 6, 7], max_new_tokens=3).token_ids, 0]]

    for door in ("generate", "stream", "accelerate", "callable", "left"):
        monkeypatch.setattr(Runner, f"_by_{door}", wrong)
    with (
        surroundings(str(tmp_path)),
        pytest.raises(Finding, match=r"python -m tests\.fuzz --seed 5"),
    ):
        for number in range(10):
            case = Case.drawn(5, number)
            case.method, case.options, case.family = "pld", {}, "Llama, grouped heads"
            Runner(case).run()
