"""Rows are found under one, two and three tokens; the newest wins; collisions are no hits.

Run: pytest tests/model/methods/hybrid/test_row_tables.py
"""

from __future__ import annotations

import random

import pytest
import torch

from model.methods.hybrid.tables import FIRST, NUM_CODES
from tests.model.methods.hybrid.misfits import misfits
from tests.model.methods.hybrid.reference_tables import ReferenceRowTables as RowTables
from tests.model.methods.hybrid.reference_tables import row_of

# Two equal logits: a probability of a half each, bucket 4 of `model.budget.best_first.CENTRES`.
CODE = 4


def write(tables: RowTables, contexts: list[tuple[int, int, int]], rows: list[list[int]]) -> None:
    """Write rows of two tokens that are equally likely."""
    for context, row in zip(contexts, rows, strict=True):
        tables.write(context, row_of(row, [0.0] * len(row)))


def entries(tokens: list[int]) -> list[int]:
    """Return a row as it is stored."""
    codes = (FIRST + CODE, CODE)
    return [token * NUM_CODES + code for token, code in zip(tokens, codes, strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_lookups_equal_dictionaries(seed: int) -> None:
    source = random.Random(seed)
    tables = RowTables(2**16, 2)
    known: dict[tuple[int, ...], list[int]] = {}
    for _ in range(20):
        contexts = [tuple(source.choices(range(6), k=3)) for _ in range(source.randrange(2, 9))]
        rows = [source.choices(range(100), k=2) for _ in contexts]
        write(tables, contexts, rows)  # type: ignore[arg-type]
        for context, row in zip(contexts, rows, strict=True):
            for length in (1, 2, 3):
                known[context[-length:]] = row
    for _ in range(100):
        context = tuple(source.choices(range(7), k=source.randrange(1, 4)))
        ends = [context[-length:] for length in range(1, len(context) + 1)]
        assert tables.find(context) == [entries(known[end]) for end in ends if end in known]


def test_a_full_table_forgets_and_never_mistakes_one_context_for_another() -> None:
    tables = RowTables(2**8, 2)
    for token in range(0, 3000, 2):
        pair = [token, token + 1]
        write(tables, [(1, 2, token), (1, 2, token + 1)], [pair, pair])
    found = {token: tables.find((token,)) for token in range(0, 3000, 2)}
    assert all(rows in ([], [entries([token, token + 1])]) for token, rows in found.items())
    assert 0 < sum(map(len, found.values())) <= 2**8


def test_memory_is_bounded_and_moves_to_another_table() -> None:
    assert RowTables(2**18, 8).num_bytes <= 16 * 2**20
    tables, other = RowTables(2**18, 2), RowTables(2**18, 2)
    write(tables, [(4, 5, 6)], [[7, 7]])
    assert other.find((4, 5, 6)) == []
    memory = tables.memory()
    assert len(memory["keys"]) == len(memory["rows"]) == 3, "one for each length of key"
    write(other, [(1, 1, 1), (4, 5, 6)], [[2, 2], [3, 3]])
    other.check_memory(memory, vocab_size=8)
    other.load_memory(memory)
    assert other.find((4, 5, 6)) == tables.find((4, 5, 6)) != []
    assert other.find((1, 1, 1)) == []
    smaller = RowTables(2**8, 2)
    smaller.check_memory(memory, vocab_size=8)
    smaller.load_memory(memory)
    assert smaller.find((4, 5, 6))
    other.reset()
    assert other.find((4, 5, 6)) == []


@pytest.mark.parametrize("name", ["keys", "rows"])
def test_tables_that_do_not_fit_are_refused(name: str) -> None:
    tables = RowTables(2**8, 2)
    write(tables, [(4, 5, 6)], [[7, 7]])
    good = tables.memory()
    for bad in misfits(good, name):
        with pytest.raises(ValueError, match="matrix: got"):
            tables.check_memory(bad, 100)
    for entry, said in (
        *((entry, "outside the vocabulary") for entry in (-1, 100 * NUM_CODES)),
        (2 * FIRST, "a code above 27"),
    ):
        with pytest.raises(ValueError, match=said):
            tables.check_memory({**good, "rows": torch.full_like(good["rows"], entry)}, 100)
