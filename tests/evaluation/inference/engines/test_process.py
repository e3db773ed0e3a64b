"""An engine in a process of its own: its words, its errors, its end.

Run: pytest tests/evaluation/inference/engines/test_process.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.inference.engines.process import EngineProcess
from tests.hang import HANG

MODULE = """
class Engine:
    def __init__(self, model):
        print("what the program says of itself", flush=True)
        if model == "absent":
            raise OSError("no such file")
        if model == "killed":
            import os, sys
            print("bad numbers", file=sys.stderr, flush=True)
            os._exit(3)
        self.facts = {"program": "stand-in 1"}

    def answer(self, prompt, room):
        if not prompt:
            raise ValueError("no prompt")
        return {"token_ids": prompt[:room]}
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of an engine, in the folder that the process begins in."""
    (tmp_path / "stand_in_engine.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[4]}")
    monkeypatch.chdir(tmp_path)


def test_an_engine_answers_until_its_standard_input_ends() -> None:
    engine = EngineProcess("stand_in_engine", {"model": "there"})
    assert engine.facts == {"program": "stand-in 1"}
    assert engine.ask(prompt=[1, 2, 3], room=2) == {"token_ids": [1, 2]}
    with pytest.raises(RuntimeError, match=r"^no prompt$"):
        engine.ask(prompt=[], room=2)
    assert engine.ask(prompt=[4], room=2) == {"token_ids": [4]}
    process = engine._process
    assert process.poll() is None and process.stdin
    process.stdin.close()
    assert process.wait(HANG) == 0
    with pytest.raises((RuntimeError, ValueError)):
        engine.ask(prompt=[4], room=2)


@pytest.mark.parametrize(
    ("model", "said"), [("absent", "OSError: no such file"), ("killed", "bad numbers")]
)
def test_an_engine_that_cannot_load_says_why(model: str, said: str) -> None:
    with pytest.raises(RuntimeError, match=rf"^{said}$"):
        EngineProcess("stand_in_engine", {"model": model})


def test_a_closed_engine_has_ended() -> None:
    engine = EngineProcess("stand_in_engine", {"model": "there"})
    engine.close()
    assert engine._process.returncode == 0
