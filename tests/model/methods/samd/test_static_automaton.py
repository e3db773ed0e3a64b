"""A saved automaton finds what a slow search of the corpus finds, and broken files are refused.

Run: pytest tests/model/methods/samd/test_static_automaton.py
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model.methods.samd.automata import BOUNDARY, FORMAT, Follower, StaticAutomaton, SuffixAutomaton


def built(documents: list[list[int]]) -> StaticAutomaton:
    """Return the automaton of a corpus."""
    automaton = SuffixAutomaton()
    for document in documents:
        automaton.extend([*document, BOUNDARY])
    return StaticAutomaton.from_automaton(automaton)


def slow_match(documents: list[list[int]], text: list[int], num_tokens: int) -> tuple[int, list]:
    """Return the longest suffix of a text that a document holds, and what follows it there first."""
    for size in range(len(text), 0, -1):
        for document in documents:
            for end in range(size, len(document) + 1):
                if document[end - size : end] == text[-size:]:
                    return size, document[end : end + num_tokens]
    return 0, []


@pytest.mark.parametrize("seed", range(30))
def test_following_a_text_equals_a_slow_search(seed: int, tmp_path: Path) -> None:
    source = random.Random(seed)
    documents = [[source.randrange(4) for _ in range(source.randrange(12))] for _ in range(4)]
    file = tmp_path / "corpus.safetensors"
    built(documents).save(file)
    follower = Follower(StaticAutomaton.load(str(file)))
    text: list[int] = []
    for _ in range(30):
        text.append(source.randrange(5))  # token 4 is in no document
        follower.extend(text[-1:])
        assert follower.match(3)[:2] == slow_match(documents, text, 3)


def test_nothing_is_left_behind_and_the_size_is_told(tmp_path: Path) -> None:
    automaton = built([[1, 2, 3], [1, 2, 4]])
    automaton.save(tmp_path / "corpus.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["corpus.safetensors"]
    assert automaton.num_bytes == sum(array.nbytes for array in automaton.arrays.values()) > 0
    assert automaton.largest_token == 4


def test_files_that_are_no_automaton_are_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "corpus.safetensors"
    with pytest.raises(ValueError, match="cannot be read"):
        StaticAutomaton.load(str(file))
    file.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="cannot be read"):
        StaticAutomaton.load(str(file))
    save_file({"adjacency": np.zeros(3, dtype=np.int32)}, file)
    with pytest.raises(ValueError, match="is not a saved automaton"):
        StaticAutomaton.load(str(file))
    save_file({"adjacency": np.zeros(3, dtype=np.int32)}, file, metadata={"format": FORMAT})
    with pytest.raises(ValueError, match="got arrays"):
        StaticAutomaton.load(str(file))


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("edge_states", 0, 99),
        ("ends", -1, 99),
        ("ends", -1, -1),
        ("links", 1, 99),
        ("links", 1, -1),
        ("links", 1, 1),  # a link to itself would be followed for ever
        ("first_edges", 1, 99),
        ("tokens", 0, -2),
    ],
)
def test_arrays_that_would_lead_astray_are_refused(
    name: str, index: int, value: int, tmp_path: Path
) -> None:
    file = tmp_path / "corpus.safetensors"
    built([[1, 2, 3], [1, 2, 4]]).save(file)
    arrays = load_file(file)
    arrays[name][index] = value
    save_file(arrays, file, metadata={"format": FORMAT})
    with pytest.raises(ValueError, match="do not fit together") as error:
        StaticAutomaton.load(str(file))
    assert "\n" not in str(error.value)


def test_it_is_loaded_once_until_its_file_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("corpus.safetensors")
    built([[1, 2, 3]]).save(file)
    first = StaticAutomaton.load(str(file))
    assert StaticAutomaton.load(str(file)) is first
    built([[1, 2, 4]]).save(file)
    assert StaticAutomaton.load(str(file)).largest_token == 4
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    built([[1, 2, 5]]).save(file)
    assert StaticAutomaton.load(str(file)).largest_token == 5, "the same name in another folder"
