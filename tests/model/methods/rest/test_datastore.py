"""Datastores find what a slow search finds, and broken files are one line.

Run: pytest tests/model/methods/rest/test_datastore.py
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from model.methods.rest.datastore import BOUNDARY, Datastore, suffix_array


@pytest.mark.parametrize("seed", range(30))
def test_the_suffix_array_sorts_all_suffixes(seed: int) -> None:
    source = random.Random(seed)
    alphabet, size = source.choice([1, 2, 5, 1000]), source.choice([1, 2, 3, 50, 200])
    tokens = [source.randrange(-1, alphabet) for _ in range(size)]
    expected = sorted(range(size), key=lambda start: tokens[start:])
    assert suffix_array(np.array(tokens, dtype=np.int32)).tolist() == expected


@pytest.mark.parametrize("seed", range(20))
def test_all_places_are_found_and_no_continuation_leaves_its_document(seed: int) -> None:
    source = random.Random(seed)
    documents = [
        [source.randrange(3) for _ in range(source.randrange(8))]
        for _ in range(source.randrange(1, 9))
    ]
    datastore = Datastore.build(documents)
    for _ in range(30):
        string = [source.randrange(3) for _ in range(source.randrange(1, 5))]
        expected = sorted(
            (document[start + len(string) :] + [BOUNDARY] * 4)[:4]
            for document in documents
            for start in range(len(document))
            if document[start : start + len(string)] == string
        )
        places = datastore.find(string, 1000)
        assert datastore.following(places, len(string), 4).tolist() == expected
        assert datastore.find(string, 2) == places[:2]


def test_a_file_is_mapped_and_gives_what_was_saved(tmp_path: Path) -> None:
    file = tmp_path / "datastore.npy"
    built = Datastore.build([[5, 6], [7]])
    built.save(file)
    loaded = Datastore.load(str(file))
    assert loaded.tokens.tolist() == [5, 6, BOUNDARY, 7, BOUNDARY]
    assert loaded.suffixes.tolist() == built.suffixes.tolist()
    assert not loaded.tokens.flags.writeable and not loaded.tokens.flags.owndata
    assert Datastore.load(str(file)) is loaded
    Datastore.build([[8]]).save(file)
    assert Datastore.load(str(file)).largest_token == 8


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        (None, "cannot be read: No such file or directory; build one"),
        (b"", "is not a datastore; build one"),
        (b"not numpy", "is not a datastore; build one"),
        (np.zeros((2, 3)), "is not a datastore"),
        (np.zeros(3, dtype=np.int32), "is not a datastore"),
        (np.zeros((3, 2), dtype=np.int32), "is not a datastore"),
        (np.zeros((2, 0), dtype=np.int32), "is not a datastore"),
        (np.array([[1, 2], [0, 2]], dtype=np.int32), "do not fit together"),
        (np.array([[1, 2], [-1, 0]], dtype=np.int32), "do not fit together"),
        (np.array([[-2, 2], [1, 0]], dtype=np.int32), "do not fit together"),
        (np.array([{"a": 1}, 2]), "is not a datastore"),
    ],
)
def test_what_is_no_datastore_is_refused(
    arrays: np.ndarray | bytes | None, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "datastore.npy"
    if isinstance(arrays, bytes):
        file.write_bytes(arrays)
    elif arrays is not None:
        np.save(file, arrays)
    with pytest.raises(ValueError, match=f"datastore {file}: .*{says}"):
        Datastore.load(str(file))
