"""After `keep` the tree cache equals a fresh cache of the kept text.

Run: pytest tests/model/backends/passes/test_cache.py
"""

from __future__ import annotations

import pytest
import torch

from model.backends.passes.cache import BufferShape, LayerShape, TreeCache
from model.backends.target import TargetModel
from model.engine.tree import DraftTree
from tests.model.decoded import random_ids, target_of

PARENTS = (-1, 0, 0, 1, 2, 2, 5)
PATHS = ([0], [0, 1], [0, 2, 5], [0, 2, 5, 6], [0, 1, 3])


def filled(target: TargetModel, text: list[int]) -> TreeCache:
    """Return a cache that has read a text."""
    cache = target.new_cache(40)
    for _ in target.prefill([*text, 0], cache, with_logits=False):
        pass
    return cache


def contents(cache: TreeCache) -> list[torch.Tensor]:
    """Return the rows in use of every buffer."""
    return [buffer[:, :, : cache.length] for buffer in cache.buffers.values()]


@torch.inference_mode()
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["Llama, grouped heads", "DeepSeek-V3", "Gemma 3n text"])
def test_kept_rows_equal_a_fresh_prefill(name: str, path: list[int]) -> None:
    target = target_of(name)
    prefix, nodes = random_ids(9), random_ids(len(PARENTS), seed=1)
    cache = filled(target, prefix)
    target.forward(DraftTree.from_lists(nodes, PARENTS), cache)
    assert cache.length == len(prefix) + len(PARENTS)
    cache.keep(len(prefix), path)
    expected = filled(target, prefix + [nodes[node] for node in path])
    assert cache.length == expected.length == cache.get_seq_length()
    for found, right in zip(contents(cache), contents(expected), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_a_wrong_kept_row_is_no_fresh_prefill() -> None:
    target = target_of("Llama, grouped heads")
    prefix, nodes = random_ids(9), random_ids(len(PARENTS), seed=1)
    with torch.inference_mode():
        cache = filled(target, prefix)
        target.forward(DraftTree.from_lists(nodes, PARENTS), cache)
        cache.keep(len(prefix), [0, 2, 4])
        expected = filled(target, prefix + [nodes[node] for node in (0, 2, 5)])
    pairs = zip(contents(cache), contents(expected), strict=True)
    assert any(not torch.allclose(found, right, atol=1e-2) for found, right in pairs)


def test_buffers_are_shared_by_shape_and_keys_may_differ_from_values() -> None:
    target = target_of("DeepSeek-V3")
    with torch.inference_mode():
        cache = filled(target, random_ids(3))
    dims = {buffer.shape[-1] for buffer in cache.buffers.values()}
    assert len(dims) == 2, "latent attention caches two tensors of different size"
    assert sum(buffer.shape[0] for buffer in cache.buffers.values()) == 2 * len(cache.layers)
    assert cache.num_bytes == sum(buffer.numel() * 4 for buffer in cache.buffers.values())


def test_layers_that_read_anothers_cache_hold_nothing() -> None:
    target = target_of("Gemma 3n text")
    cache = target.new_cache(10)
    num_rows = sum(buffer.shape[0] for buffer in cache.buffers.values())
    assert num_rows == 4, "keys and values of the two layers that write"


@pytest.mark.parametrize(("device", "sizes"), [("cpu", {600, 1000}), ("cuda", {1024})])
def test_texts_of_like_lengths_have_caches_of_one_size_on_a_gpu(
    device: str, sizes: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of("Llama, grouped heads")
    monkeypatch.setattr(target, "device", torch.device(device))
    caches = [target.new_cache(capacity) for capacity in (600, 1000)]
    assert {cache.capacity for cache in caches} == sizes
    assert {buffer.shape[2] for cache in caches for buffer in cache.buffers.values()} == sizes


def shape() -> BufferShape:
    """Return a small shape."""
    return BufferShape(1, 2, torch.float32, torch.device("cpu"))


def test_a_full_cache_is_an_error_that_says_so() -> None:
    cache = TreeCache([LayerShape(shape(), shape())], capacity=3)
    rows = torch.ones(1, 1, 2, 2)
    cache.update(rows, rows, 0)
    with pytest.raises(ValueError, match="4 rows asked for, capacity 3"):
        cache.update(rows, rows, 0)
    assert cache.length == 2, "a refused append changes nothing"


def test_each_layer_knows_its_own_length_within_a_pass() -> None:
    # Llama 4 asks each layer for its length before it appends; the first layer is ahead by then.
    cache = TreeCache([LayerShape(shape(), shape()), None, LayerShape(shape(), shape())], 5)
    rows = torch.ones(1, 1, 2, 2)
    cache.update(rows, rows, 0)
    assert [cache.get_seq_length(layer) for layer in range(3)] == [2, 2, 0]


def test_keep_of_rows_in_place_copies_nothing() -> None:
    cache = TreeCache([LayerShape(shape(), shape())], capacity=6)
    rows = torch.arange(8.0).reshape(1, 1, 4, 2)
    cache.update(rows, rows, 0)
    (buffer,) = cache.buffers.values()
    version = buffer._version
    cache.keep(1, [0, 1])
    assert cache.length == 3 and buffer._version == version
