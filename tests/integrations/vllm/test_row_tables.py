"""The tables of rows, against dictionaries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from token_recycling_vllm.row_tables import NO_TOKEN, RowTables, averaged

from model.methods.recycling import adjacency
from model.methods.recycling.drafter import AveragedRecyclingConfig, RecyclingDrafter

K, VOCAB = 4, 50


def rows(rng, count):
    ids = np.stack([rng.permutation(VOCAB)[:K] for _ in range(count)]).astype(np.int32)
    shares = np.sort(rng.dirichlet(np.ones(K), count), axis=1)[:, ::-1].astype(np.float32)
    return ids, shares


def test_rows_are_found_by_the_last_tokens_and_the_last_write_wins():
    rng = np.random.default_rng(0)
    tables = RowTables(VOCAB, K, 16, share=True)
    contexts = rng.integers(0, 6, (300, 3))
    ids, shares = rows(rng, 300)
    numbers = np.zeros(300, dtype=np.int64)
    tables.write(contexts, numbers, ids, shares)
    found, found_shares = tables.read(contexts, numbers, K)
    for length in (2, 3):
        newest = {tuple(context[-length:]): place for place, context in enumerate(contexts)}
        for place, context in enumerate(contexts):
            row = newest[tuple(context[-length:])]
            assert (found[place, length - 1] == ids[row]).all()
            assert (found_shares[place, length - 1] == shares[row]).all()
    _, none = tables.read(
        np.array([[1, 2, 40], [NO_TOKEN, NO_TOKEN, 1]]), np.zeros(2, dtype=np.int64), K
    )
    assert not none[0].any() and not none[1, 1:].any() and none[1, 0].any()


def test_single_tokens_average_as_the_library_does():
    rng = np.random.default_rng(1)
    old, new = rows(rng, 64), rows(rng, 64)
    found = averaged(*old, *new)
    expected = adjacency.averaged(*map(torch.from_numpy, (*old, *new)))
    assert torch.allclose(torch.from_numpy(found[1]), expected[1], atol=1e-6)
    assert (
        np.sort(found[0], axis=1) == np.sort(expected[0].numpy(), axis=1)
    ).mean() > 0.99  # equal shares


def test_a_first_row_is_kept_as_it_is_and_a_second_one_counts_half():
    tables = RowTables(VOCAB, 2, 8, share=True)
    context, number = np.array([[NO_TOKEN, NO_TOKEN, 3]]), np.zeros(1, dtype=np.int64)
    for ids, shares in (([5, 6], [0.75, 0.25]), ([6, 7], [0.75, 0.25])):
        tables.write(context, number, np.array([ids], np.int32), np.array([shares], np.float32))
        found, found_shares = tables.read(context, number, 2)
        expected = {5: 0.75, 6: 0.25} if ids == [5, 6] else {6: 1.0 / 1.75, 5: 0.75 / 1.75}
        assert dict(zip(found[0, 0].tolist(), found_shares[0, 0].tolist(), strict=True)) == (
            pytest.approx(expected)
        )


def test_texts_that_do_not_share_never_see_each_others_rows():
    rng = np.random.default_rng(2)
    tables = RowTables(VOCAB, K, 12, share=False)
    contexts = rng.integers(0, VOCAB, (20, 3))
    tables.write(contexts, np.full(20, 7), *rows(rng, 20))
    assert tables.read(contexts, np.full(20, 7), K)[1].any(axis=2).all()
    assert not tables.read(contexts, np.full(20, 8), K)[1].any()


def test_tokens_outside_the_vocabulary_have_no_row():
    tables = RowTables(VOCAB, K, 12, share=True)
    context = np.array([[1, 2, VOCAB + 3]])
    tables.write(context, np.zeros(1, dtype=np.int64), *rows(np.random.default_rng(3), 1))
    assert not tables.read(context, np.zeros(1, dtype=np.int64), K)[1].any()


def test_a_saved_matrix_is_the_librarys(tmp_path):
    rng = np.random.default_rng(4)
    tables = RowTables(VOCAB, K, 12, share=True)
    contexts = rng.integers(0, VOCAB, (30, 3))
    tables.write(contexts, np.zeros(30, dtype=np.int64), *rows(rng, 30))
    file = tmp_path / "matrix.safetensors"
    tables.save(file)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]

    from safetensors.torch import load_file

    config = AveragedRecyclingConfig(output_id_topk=K, tree_version=str(_tree(tmp_path)))
    drafter = RecyclingDrafter(config, VOCAB, torch.device("cpu"))
    drafter.load_memory(load_file(file))
    again = RowTables(VOCAB, K, 12, share=True)
    again.load(file)
    one = contexts[:, -1:].repeat(3, axis=1)
    numbers = np.zeros(30, dtype=np.int64)
    for first, second in zip(
        tables.read(one, numbers, K), again.read(one, numbers, K), strict=True
    ):
        assert (first[:, 0] == second[:, 0]).all()
    assert (drafter.memory()["adjacency"].numpy() == tables._successors[:VOCAB]).all()


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("adjacency", np.zeros((VOCAB + 1, K), np.int32), "allowed: \\[50, 4\\]"),
        ("adjacency", np.full((VOCAB, K), VOCAB, np.int32), "outside 0 to 49"),
        ("shares", np.full((VOCAB, K), 2, np.float32), "outside 0 to 1"),
        ("rates", np.zeros(3, np.float32), "allowed: adjacency, shares"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, name, tensor, message):
    from safetensors.numpy import save_file

    good = {"adjacency": np.zeros((VOCAB, K), np.int32), "shares": np.zeros((VOCAB, K), np.float32)}
    save_file({**good, name: tensor}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=message):
        RowTables(VOCAB, K, 12, share=True).load(tmp_path / "m.safetensors")


def _tree(folder):
    file = folder.parent / "tree.json"
    file.write_text("[[0], [1], [0, 0]]")
    return file
