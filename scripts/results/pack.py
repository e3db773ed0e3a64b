"""Packs: the answer files of one comparison with their sidecars, compressed."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from evaluation.scoring.comparable import group_answers, load_answers
from evaluation.scoring.groups import Group
from model.commands.command_line import UserError
from model.commands.files import write_whole

KEPT = ("*.jsonl", "*.meta.json", "*.equal.json")


def pack(folder: Path, out: Path) -> None:
    """Write a folder's answer files, those of its subfolders included, to a pack.

    The same files give the same bytes: a pack's name, hash and content do not depend on when it was made.

    Raises:
        UserError: if there is none, or the pack cannot be written.
    """
    files = sorted(file for pattern in KEPT for file in folder.rglob(pattern))
    if not any(file.suffix == ".jsonl" for file in files):
        raise UserError(f"folder: got {folder}; allowed: one with answer files (*.jsonl)")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz", preset=9) as archive:
        for file in files:
            info = tarfile.TarInfo(file.relative_to(folder).as_posix())
            info.size = file.stat().st_size
            with file.open("rb") as content:
                archive.addfile(info, content)
    write_whole(out, buffer.getvalue())


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Unpack a pack into a folder that lives as long as the context.

    Raises:
        UserError: if it is not a pack.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            with tarfile.open(path, mode="r:xz") as archive:
                for member in archive:
                    _extract(archive, member, Path(folder))
        except (OSError, tarfile.TarError, EOFError) as error:
            raise UserError(f"{path}: is not a pack of answer files ({error})") from error
        yield Path(folder)


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write a file of an archive below a folder; by hand, since older Pythons have no safe way of their own."""
    target, content = folder / member.name, archive.extractfile(member)
    if content is None or ".." in target.parts or not target.is_relative_to(folder):
        raise tarfile.TarError(f"{member.name} is not a file below it")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content.read())


@cache
def groups_of(path: Path) -> tuple[list[Group], str]:
    """Return the groups of a pack's answers, measured, and the folder that stands before their files' names.

    Each folder of a pack is a comparison of its own: methods are compared with the baseline beside them.
    A pack is read once in a process: several tables of several pages are made from it.

    Raises:
        UserError: if it is not a pack, or its answers cannot be compared.
    """
    with unpacked(path) as folder:
        folders = sorted({file.parent for file in folder.rglob("*.jsonl")})
        found = [[load_answers(file) for file in sorted(one.glob("*.jsonl"))] for one in folders]
        return [group for files in found for group in group_answers(files)], f"{folder}/"
