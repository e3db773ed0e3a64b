"""Which functions of the product run while something is done: the width of a step, and of a command."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("model", "evaluation", "scripts", "integrations")
IS_FUNCTION = 0x2  # inspect.CO_NEWLOCALS: neither a module nor the body of a class


@contextmanager
def traced() -> Iterator[dict[str, set[str]]]:
    """Note the functions that are called within the block, in all threads, by the file that they are in."""
    called: dict[str, set[str]] = {}
    known: dict[CodeType, bool] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code not in known:
            known[code] = True
            if code.co_flags & IS_FUNCTION and (file := _file_of(code)):
                called.setdefault(file, set()).add(f"{code.co_name}:{code.co_firstlineno}")

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def num_lines(called: Mapping[str, object]) -> int:
    """Return the lines of these files, all in all."""
    return sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in called)


def listed(called: Mapping[str, set[str]]) -> str:
    """Return the files with the number of functions that were called in each, as a list to read."""
    return "\n".join(f"{len(called[file]):4} {file}" for file in sorted(called))


def _file_of(code: CodeType) -> str:
    """Return the file of the product that this code is in, below the root; of other code ""."""
    file = Path(code.co_filename)
    if not file.is_relative_to(ROOT):
        return ""
    place = file.relative_to(ROOT)
    return place.as_posix() if place.parts[0] in PRODUCT else ""
