"""The categories of answers: from a question file where their writer gave none, and renamed on demand.

Use:
    categories = Categories.read("question.jsonl", ["math=math_reasoning"])
    rows = [categories.of(row) for row in rows]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evaluation.answers.row import AnswerRow
from evaluation.questions.questions import Question, category_map, load_questions


@dataclass(frozen=True, slots=True)
class Categories:
    """Questions by id and by text, and new names of categories."""

    by_id: Mapping[int | str, Question] = field(default_factory=dict)
    by_turns: Mapping[tuple[str, ...], Question] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, question_file: str | Path | None, renames: Sequence[str] = ()) -> Categories:
        """Return the categories of a question file (None: no file), renamed by texts such as `OLD=NEW`.

        Raises:
            UserError: if the file cannot be read, or a text is not of that form.
        """
        questions = load_questions(Path(question_file)) if question_file else []
        return cls(
            {question.question_id: question for question in questions},
            {question.turns: question for question in questions},
            category_map(renames),
        )

    def of(self, row: AnswerRow) -> AnswerRow:
        """Return a row with its question's category if it has none, by the new name if there is one.

        A row that holds the turns of its question is found by them: its id may be its place in a run.
        """
        category = row.category
        if not row.has_category:
            turns = row.values.get("turns")
            if turns is None:
                question = self.by_id.get(row.question_id)
            else:
                question = self.by_turns.get(tuple(map(str, turns)))
            category = question.category if question else category
        category = self.renamed.get(category, category)
        return row if category == row.category else row.plus(category=category)
