"""A layer's graph with operations of `model.kernels` in place of several of torch's.

Each rewrite keeps what is computed, but for rounding: fewer operations, and weights that share their inputs in one.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .capture import length

aten, ours = torch.ops.aten, torch.ops.token_recycling
# The last index of a slice to the end.
END = 2**63 - 1
# What a layer that attends to a cache is handed beside its own inputs.
HANDED = ("key_buffer", "value_buffer", "mask")


def rewrite(graph: fx.Graph) -> None:
    """Rewrite a graph in place."""
    _drop_casts(graph)
    _use_few_rows(graph)
    _use_rotate(graph)
    _use_gated(graph)
    graph.eliminate_dead_code()


def _nodes(graph: fx.Graph, operation: Any) -> list[Any]:
    return list(graph.find_nodes(op="call_function", target=operation))


def _drop_casts(graph: fx.Graph) -> None:
    """Drop casts to the dtype that a tensor has."""
    for node in _nodes(graph, aten.to.dtype):
        rows, dtype = node.args[:2]
        if len(node.args) == 2 and not node.kwargs and rows.meta["val"].dtype == dtype:
            node.replace_all_uses_with(rows)


def _use_few_rows(graph: fx.Graph) -> None:
    """Use the kernel for a few rows; layers without bias that share their inputs in one call."""
    groups: dict[Any, list[Any]] = {}
    # Layers with packed weights use it themselves; numbers and packed weights do not share a call.
    for node in (*_nodes(graph, aten.linear.default), *_nodes(graph, ours.few_rows.default)):
        inputs, weight, *bias = node.args
        if weight.op != "placeholder":
            continue
        if bias and bias[0] is not None:
            with graph.inserting_before(node):
                found = graph.call_function(ours.few_rows.default, (inputs, weight, bias[0]))
            found.meta = node.meta
            node.replace_all_uses_with(found)
        else:
            groups.setdefault((inputs, node.target), []).append(node)
    for (inputs, _), nodes in groups.items():
        with graph.inserting_before(nodes[0]):
            together = graph.call_function(
                ours.few_rows_of_layers.default, (inputs, [node.args[1] for node in nodes])
            )
            together.meta["val"] = [node.meta["val"] for node in nodes]
            for index, node in enumerate(nodes):
                part = graph.call_function(operator.getitem, (together, index))
                part.meta = node.meta
                node.replace_all_uses_with(part)


def _use_rotate(graph: fx.Graph) -> None:
    """Use one operation for x cos + (-x2, x1) sin, where x1 and x2 are the halves of a head x."""
    for node in _nodes(graph, aten.add.Tensor):
        if (found := _rotated(node)) is not None:
            with graph.inserting_before(node):
                rotated = graph.call_function(ours.rotate.default, found)
            rotated.meta = node.meta
            node.replace_all_uses_with(rotated)


def _use_gated(graph: fx.Graph) -> None:
    """Use one operation for silu(gate) times rows."""
    for node in _nodes(graph, aten.mul.Tensor):
        gate, others = node.args
        if (
            not all(isinstance(one, fx.Node) for one in node.args)
            or gate.target is not aten.silu.default
        ):
            continue
        shapes = {(one.meta["val"].shape, one.meta["val"].dtype) for one in (gate, others)}
        if len(shapes) == 1:
            with graph.inserting_before(node):
                found = graph.call_function(ours.gated.default, (gate.args[0], others))
            found.meta = node.meta
            node.replace_all_uses_with(found)


def with_cache(graph: fx.Graph, scale: float) -> fx.Graph:
    """Return a graph that also appends its keys and values to a cache and attends, in one operation.

    Args:
        graph: of a layer, with the marks `captured_update` and `captured_attention`.
        scale: of the scores.

    Returns:
        A copy whose first inputs are the buffers of keys and values, and the mask.
    """
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    (update,) = _nodes(copied, ours.captured_update.default)
    (attend,) = _nodes(copied, ours.captured_attention.default)
    with copied.inserting_before(next(iter(copied.nodes))):
        handed = [copied.placeholder(name) for name in HANDED]
    with copied.inserting_before(attend):
        arguments = (attend.args[0], *update.args, *handed, scale, copied.call_function(length))
        found = copied.call_function(ours.attend_with_cache.default, arguments)
    found.meta = attend.meta
    attend.replace_all_uses_with(found)
    copied.eliminate_dead_code()
    return copied


def _rotated(node: Any) -> tuple[Any, Any, Any] | None:
    """Return (heads, cosines, sines) of a sum that is a rotation; else None."""
    match node.args:
        case (fx.Node() as straight, fx.Node() as crossed) if not node.kwargs:
            pass
        case _:
            return None
    heads, cosines = _factors(straight)
    swapped, sines = _factors(crossed)
    if heads is None or swapped is None or heads.meta["val"].ndim != 4:
        return None
    half, odd = divmod(heads.meta["val"].shape[-1], 2)
    match swapped:
        case fx.Node(target=aten.cat.default, args=([fx.Node() as high, fx.Node() as low], -1 | 3)):
            pass
        case _:
            return None
    is_swap = (
        not odd
        and high.target is aten.neg.default
        and _is_slice(high.args[0], heads, half, END)
        and _is_slice(low, heads, 0, half)
    )
    of_rows = [_of_positions(one) for one in (cosines, sines)]
    if not is_swap or None in of_rows:
        return None
    return heads, of_rows[0], of_rows[1]


def _factors(node: Any) -> tuple[Any, Any]:
    return node.args if node.target is aten.mul.Tensor else (None, None)


def _is_slice(node: Any, of: Any, begin: int, end: int) -> bool:
    return node.target is aten.slice.Tensor and node.args == (of, 3, begin, end)


def _of_positions(node: Any) -> Any:
    """Return the [1, n, D] of which a node is [1, 1, n, D]; None if it is not."""
    is_unsqueezed = node.target is aten.unsqueeze.default and node.args[1] == 1
    return node.args[0] if is_unsqueezed else None
