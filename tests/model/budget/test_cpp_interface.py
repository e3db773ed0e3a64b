"""The functions and the struct that C++ sources share with Python."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from model.budget.best_first import declare_functions, shared_struct

SOURCE = """
struct Other { int64_t ignored; };

// Settings; of all kinds.
struct Shared {
  int64_t first, second;  // numbers; of something
  double share;
  const int32_t* tokens;  // [first]
};

int64_t helper(int64_t number) { return number; }

extern "C" {

Pool* pool_new(const Shared* shared) { return new Pool(*shared); }

void pool_write(
    Pool* pool, const int32_t* tokens, int64_t count, int32_t flag,
    double margin) {
  if (count) return;
}

}  // extern "C"
"""
VALUES = {"first": 3, "second": 4, "share": 0.5, "tokens": np.arange(3, dtype=np.int32)}


def test_a_struct_is_filled_by_name_in_the_order_of_the_source() -> None:
    shared = shared_struct(SOURCE, dict(reversed(VALUES.items())))
    assert [name for name, *_ in shared._fields_] == ["first", "second", "share", "tokens"]
    assert (shared.first, shared.second, shared.share) == (3, 4, 0.5)
    assert shared.tokens == VALUES["tokens"].ctypes.data
    assert ctypes.sizeof(shared) == 4 * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"third": 1}, "third in Python or in C\\+\\+ alone"),
        ({"tokens": np.arange(3)}, "tokens: got an array of int64; allowed: int32_t"),
        ({"share": np.arange(3.0)}, "share: got an array of float64; allowed: double"),
    ],
)
def test_other_names_and_dtypes_than_the_source_declares_are_refused(
    change: dict, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        shared_struct(SOURCE, VALUES | change)
    with pytest.raises(TypeError, match="share in Python"):
        shared_struct(SOURCE, {name: VALUES[name] for name in VALUES if name != "share"})


def test_functions_have_the_types_of_the_source() -> None:
    library = SimpleNamespace(pool_new=SimpleNamespace(), pool_write=SimpleNamespace())
    declare_functions(library, SOURCE)  # type: ignore[arg-type]
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    assert (library.pool_new.restype, library.pool_new.argtypes) == (pointer, [pointer])
    assert library.pool_write.restype is None
    assert library.pool_write.argtypes == [
        pointer,
        pointer,
        number,
        ctypes.c_int32,
        ctypes.c_double,
    ]
