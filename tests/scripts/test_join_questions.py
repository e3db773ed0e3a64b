"""Joined questions hold the prompts of one category, in order.

Run: pytest tests/scripts/test_join_questions.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.questions.questions import load_questions, question_file_of
from model.commands.command_line import UserError
from scripts.join_questions import main

DEMO = question_file_of("demo", None)


def test_prompts_of_a_category_become_one(tmp_path: Path) -> None:
    out = tmp_path / "new" / "question.jsonl"
    words = [str(DEMO), "--num-joined", "2", "--out", str(out)]
    assert main([*words, "--categories", "rag", "code"]) == 0
    rag, *code = load_questions(out)
    asked = [one.turns[0] for one in load_questions(DEMO) if one.category == "rag"]
    assert rag.category == "rag" and rag.turns == ("\n\n".join(asked),)
    assert [one.question_id for one in code] == ["code-1", "code-2"]
    assert main(words) == 0
    assert len(load_questions(out)) == 15


def test_what_cannot_be_joined_is_refused(tmp_path: Path) -> None:
    words = [str(DEMO), "--out", str(tmp_path / "a.jsonl")]
    with pytest.raises(UserError, match="num_joined: got 1; allowed: 2 or more"):
        main([*words, "--num-joined", "1"])
    with pytest.raises(UserError, match="num_joined: got 5; allowed: 2 to 4"):
        main([*words, "--num-joined", "5"])
    with pytest.raises(UserError, match="categories: got 'songs'; allowed: writing"):
        main([*words, "--categories", "songs"])
