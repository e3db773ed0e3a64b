"""Whether a method's answers are the baseline's: without that, a speed-up says nothing.

Tokens are compared, question by question, where both files hold them; else texts. Greedy decoding in float32 or
wider gives equal tokens, or the method is not lossless. In half precision two nearly equal logits may change
places: there, and in files whose conditions are not known, differences are counted; `evaluation.equal
--model-path` judges them, and its verdict is kept beside the method's file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.answers.differences import compare_answers
from evaluation.answers.record import RunRecord
from evaluation.answers.row import AnswerRow
from model.commands.files import file_hash, write_whole

WIDE_DTYPES = ("float32", "float64")


@dataclass(frozen=True, slots=True)
class Equality:
    """How many answers of a method are the baseline's, over all its runs."""

    num_compared: int = 0  # questions that both sides answered
    num_differing: int = 0  # of these, questions whose answers differ
    num_by_text: int = 0  # of those compared, questions of which a side has no tokens
    must_be_equal: bool = False  # whether any difference is an error
    # Of the differing questions, those that `evaluation.equal` judged a near-tie that rounding decided; None where
    # it was not asked about every one.
    num_ties: int | None = None

    @property
    def is_broken(self) -> bool:
        """Whether the method is not lossless: answers differ that must be equal, or that were judged a bug."""
        num_bugs = 0 if self.num_ties is None else self.num_differing - self.num_ties
        return bool(num_bugs or (self.must_be_equal and self.num_differing))

    def __str__(self) -> str:
        if not self.num_compared:
            return "-"
        judged = ""
        if self.num_ties is not None:
            num_bugs = self.num_differing - self.num_ties
            judged = (
                f" ({self.num_ties} near-ties, {num_bugs} bugs)" if num_bugs else " (near-ties)"
            )
        return f"{self.num_differing} of {self.num_compared}{judged}"

    def plus(self, other: Equality) -> Equality:
        """Return both as one; ties are known only if both know them."""
        parts = (self, other)
        ties = [part.num_ties if part.num_differing else 0 for part in parts]
        known = [count for count in ties if count is not None]
        is_judged = len(known) == 2 and any(part.num_ties is not None for part in parts)
        return Equality(
            self.num_compared + other.num_compared,
            self.num_differing + other.num_differing,
            self.num_by_text + other.num_by_text,
            self.must_be_equal or other.must_be_equal,
            sum(known) if is_judged else None,
        )


def equality_of(
    rows: Sequence[AnswerRow],
    record: RunRecord,
    base_rows: Sequence[AnswerRow],
    base_record: RunRecord,
    num_ties: int | None = None,
) -> Equality:
    """Compare a file's answers with the baseline's; nothing is compared where answers were sampled.

    A question that failed on a side is left out. `num_ties` differences were judged near-ties; None: not judged.
    """
    records = (record, base_record)
    if any(one.is_greedy is False for one in records):
        return Equality()
    sides = [
        {row.question_id: row for row in side if not row.is_failed} for side in (rows, base_rows)
    ]
    common = [key for key in sides[0] if key in sides[1]]
    found = compare_answers(*([side[key] for key in common] for side in sides))
    by_text = sum(
        not all(choice.has_token_ids for side in sides for choice in side[key].choices)
        for key in common
    )
    must_be_equal = all(one.is_greedy and one.dtype in WIDE_DTYPES for one in records)
    return Equality(len(common), len(found.differences), by_text, must_be_equal, num_ties)


def verdict_path(path: str | Path) -> Path:
    """Return where the verdict of `evaluation.equal` on an answer file lies: `ANSWERS.equal.json`."""
    return Path(path).with_name(Path(path).name.removesuffix(".jsonl") + ".equal.json")


def write_verdict(path: str | Path, base_path: str | Path, num_ties: int, num_bugs: int) -> None:
    """Keep what was judged beside an answer file.

    Raises:
        UserError: if it cannot be written.
    """
    verdict = {
        "sha256": file_hash(Path(path)),
        "base_sha256": file_hash(Path(base_path)),
        "ties": num_ties,
        "bugs": num_bugs,
    }
    write_whole(verdict_path(path), json.dumps(verdict, indent=2) + "\n")


def read_ties(path: str | Path, base_path: str | Path) -> int | None:
    """Return how many differences were judged near-ties; None if these two files, as they are, were not judged."""
    try:
        verdict = json.loads(verdict_path(path).read_text(encoding="utf-8"))
        hashes = [verdict["sha256"], verdict["base_sha256"]]
        num_ties = int(verdict["ties"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    try:
        found = [file_hash(Path(path)), file_hash(Path(base_path))]
    except OSError:
        return None
    return num_ties if hashes == found else None
