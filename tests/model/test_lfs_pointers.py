"""A file that Git LFS has not fetched is named as one wherever the library opens a file itself.

Run: pytest tests/model/test_lfs_pointers.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from model.api.loading.weights import check_gguf
from model.budget import memory
from model.commands import loading
from model.methods.heads.head_files import read_heads
from model.methods.rest.datastore import Datastore
from model.methods.samd.automata import StaticAutomaton

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def open_heads(file: str) -> object:
    folder = Path(file).parent
    (folder / "config.json").write_text("{}")
    Path(file).rename(folder / "model.safetensors")
    return read_heads(folder, "model", "EAGLE")


@pytest.mark.parametrize(
    "opened",
    [
        open_heads,
        check_gguf,
        memory.read_memory,
        loading.read_memory,
        StaticAutomaton.load,
        Datastore.load,
    ],
)
def test_a_pointer_is_named_as_one(opened: Callable[[str], Any], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text(POINTER)
    with pytest.raises(Exception, match=r"is a Git LFS pointer, .*; run git lfs pull") as error:
        opened(str(file))
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)
