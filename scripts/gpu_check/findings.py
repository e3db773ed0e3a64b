"""The findings of a block of the check: figures, tables for people, notes, and problems, each in one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from model.commands.command_line import first_line

T = TypeVar("T")
PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"


class Table(NamedTuple):
    """A table for people."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Findings:
    """The findings of a block.

    Attributes:
        figures: for the JSON report and for the verdicts.
        tables: for people.
        notes: remarks, a line each.
        problems: what is wrong, a line each; with any, the block has failed.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def attempt(self, what: str, call: Callable[[], T]) -> T | None:
        """Return the result of one measurement of several; an error is a problem, and the others go on."""
        try:
            return call()
        except Exception as error:  # on an unknown device anything may be raised
            self.problems.append(f"{what}: {one_line(error)}")
            return None


@dataclass
class Result:
    """A block after its run.

    Attributes:
        number: of the block.
        title: of the block.
        status: passed, FAILED or skipped.
        seconds: it took.
        findings: what it found; with the reason why it was skipped.
    """

    number: int
    title: str
    status: str
    seconds: float
    findings: Findings

    @property
    def record(self) -> dict[str, Any]:
        """The block in the JSON report."""
        found = self.findings
        return {
            "block": self.number,
            "title": self.title,
            "status": self.status,
            "seconds": round(self.seconds, 3),
            "notes": found.notes,
            "problems": found.problems,
            "figures": found.figures,
        }


def one_line(error: BaseException) -> str:
    """Return an error in one line, with its type."""
    return f"{type(error).__name__}: {first_line(error)}"


def cell(value: float | None, digits: int = 2) -> str:
    """Return a figure for a table; "-" for none."""
    return "-" if value is None else f"{value:.{digits}f}"
