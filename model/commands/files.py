"""Files of commands: atomic writes, and bounded reads of untrusted files.

After a crash a file written here is the old one or all of the new one (`model.machine.files`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..machine.files import atomic_write
from .command_line import UserError, first_line


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file; `write` gets a path and writes the new content there.

    Raises:
        UserError: if the file cannot be written; the old one is unchanged.
    """
    try:
        with atomic_write(path) as temporary:
            write(temporary)
    except (OSError, SafetensorError) as error:
        cause = error.strerror if isinstance(error, OSError) else first_line(error)
        raise UserError(f"cannot write {path}: {cause}") from error


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write bytes, or a text as UTF-8 with its line ends, as `replace_file`."""
    data = content if isinstance(content, bytes) else content.encode("utf-8")
    replace_file(Path(path), lambda file: file.write_bytes(data))


def check_output(file: str | Path, option: str) -> None:
    """Raise UserError for an output file that could not be written later."""
    folder = Path(file).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(file).is_dir():
        raise UserError(f"{option}: got {file}; allowed: a file in an existing, writable folder")


def refuse_outputs(outputs: Iterable[str | Path], inputs: Iterable[str | Path]) -> None:
    """Raise a UserError that names the file where an input would be overwritten, or one file written twice."""
    taken = {Path(path).resolve(): "one of the files to read" for path in inputs}
    for output in outputs:
        place = Path(output).resolve()
        if place in taken:
            raise UserError(f"{output} is {taken[place]}; give another file to write to")
        taken[place] = "to be written twice"


def read_text(path: Path, what: str, max_bytes: int) -> str:
    """Return the text of an ordinary file of at most `max_bytes`; a pipe or a device could have no end.

    A byte order mark, which some editors write, is no part of it.

    Raises:
        UserError: naming `what`, if it does not exist, is not UTF-8, not an ordinary file, or too large.
    """
    check_file(path, what, max_bytes)
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{what} {path}: is not UTF-8 text; save it as UTF-8") from error
    except OSError as error:
        raise UserError(f"{what} {path}: cannot be read: {error}") from error


def check_file(path: Path, what: str, max_bytes: int) -> None:
    """Raise UserError for anything but an ordinary file of at most `max_bytes`."""
    try:
        size = path.stat().st_size
        is_ordinary = path.is_file()
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        raise UserError(f"{what} {path!s}: cannot be read: {error}") from error
    if not is_ordinary:
        kind = "a directory" if path.is_dir() else "a pipe or a device"
        raise UserError(f"{what} {path}: cannot be read: it is {kind}, not a file")
    if size > max_bytes:
        raise UserError(f"{what} {path}: has {size} bytes; allowed: at most {max_bytes}")


def parse_json(text: str, where: str) -> Any:
    """Parse JSON from an untrusted file; `where` is file and line, for errors.

    Raises:
        UserError: if it is not JSON, nests too deep, repeats a key, or holds a lone surrogate, which
            neither a tokenizer nor a terminal accepts.
    """
    try:
        value = json.loads(text, object_pairs_hook=_without_duplicates)
        # Only an escape can make a lone surrogate; encoding finds it anywhere.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: holds half of a surrogate pair; allowed: text") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not JSON: {first_line(error)}") from None
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {ascii(key)[:60]} occurs twice")
        found[key] = value
    return found


def file_hash(file: Path) -> str:
    """Return the sha256 of a file, which tells files apart."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while chunk := content.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()
