"""A layer's graph as programs for the library of `model.kernels`: whole, and in two parts around its attention.

First several of torch's operations give way to those of `model.kernels`. Each rewrite keeps what is computed, but
for rounding: fewer operations, and weights that share their inputs in one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ...kernels.registered_attention import is_special
from .capture import Captured, NoProgramError, length, rows

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


def _replace(graph: fx.Graph, node: Any, operation: Any, arguments: tuple[Any, ...]) -> None:
    """Use another operation's result in place of a node's, which is of the same shape."""
    with graph.inserting_before(node):
        found = graph.call_function(operation, arguments)
    found.meta = node.meta
    node.replace_all_uses_with(found)


def _drop_casts(graph: fx.Graph) -> None:
    """Drop casts to the dtype that a tensor has."""
    for node in _nodes(graph, aten.to.dtype):
        rows, dtype = node.args[:2]
        if len(node.args) == 2 and not node.kwargs and rows.meta["val"].dtype == dtype:
            node.replace_all_uses_with(rows)


def _use_few_rows(graph: fx.Graph) -> None:
    """Use the kernel for a few rows; layers without bias that share their inputs in one call."""
    groups: dict[Any, list[Any]] = {}
    # Layers with quantised weights use it themselves; weights of several kinds do not share a call.
    for node in (*_nodes(graph, aten.linear.default), *_nodes(graph, ours.few_rows.default)):
        inputs, weight, *bias = node.args
        if weight.op != "placeholder":
            continue
        if bias and bias[0] is not None:
            _replace(graph, node, ours.few_rows.default, (inputs, weight, bias[0]))
        else:
            groups.setdefault((inputs, node.target, weight.meta["val"].dtype), []).append(node)
    for (inputs, *_), nodes in groups.items():
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
            _replace(graph, node, ours.rotate.default, found)


def _use_gated(graph: fx.Graph) -> None:
    """Use one operation for silu(gate) times rows."""
    for node in _nodes(graph, aten.mul.Tensor):
        gate, others = node.args
        are_nodes = all(isinstance(one, fx.Node) for one in node.args)
        if not are_nodes or gate.target is not aten.silu.default:
            continue
        shapes = {(one.meta["val"].shape, one.meta["val"].dtype) for one in (gate, others)}
        if len(shapes) == 1:
            _replace(graph, node, ours.gated.default, (gate.args[0], others))


def with_cache(graph: fx.Graph, scale: float) -> fx.Graph:
    """Return a copy of a layer's graph that also appends to a cache and attends, in one operation.

    Its first inputs are the buffers of keys and values, and the mask.
    """
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    (update,) = _nodes(copied, ours.captured_update.default)
    (attend,) = _nodes(copied, ours.captured_attention.default)
    with copied.inserting_before(next(iter(copied.nodes))):
        handed = [copied.placeholder(name) for name in HANDED]
    with copied.inserting_before(attend):
        arguments = (attend.args[0], *update.args, *handed, scale, copied.call_function(length))
    _replace(copied, attend, ours.attend_with_cache.default, arguments)
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


class LayerPart(NamedTuple):
    """A program, and what it reads of a layer beside what it is handed, by number."""

    program: Any  # what it is handed, inputs, weights -> its results
    inputs: list[int]
    weights: list[int]


class Programs(NamedTuple):
    """The programs of a layer."""

    # Nothing is handed to it -> query, new keys, new values, and what `after` needs.
    before: LayerPart
    after: LayerPart  # attended values, and what it needs -> the layer's rows
    # Buffers of keys and values, and the mask -> the layer's rows; None if it attends in an unusual way.
    whole: LayerPart | None


def programs(layer: Captured) -> Programs:
    """Return the programs of a layer; raise NoProgramError if its graph cannot be run in two parts."""
    nodes: list[Any] = list(layer.graph.nodes)
    (output,) = (node for node in nodes if node.op == "output")
    (update,) = (node for node in nodes if node.target is ours.captured_update.default)
    (attend,) = (node for node in nodes if node.target is ours.captured_attention.default)
    given = [node for node in nodes if node.op == "placeholder"]
    query, keys, values = attend.args
    if [_place_in(one, update) for one in (keys, values)] != [0, 1]:
        raise NoProgramError("a layer that attends to other keys than those it caches")
    border = nodes.index(attend)
    skipped = {output, update, attend, keys, values, *given}
    before = [node for node in nodes[:border] if node not in skipped]
    after = [node for node in nodes[border:] if node not in skipped]
    used_after = {one for node in (*after, output) for one in node.all_input_nodes}
    if not used_after.isdisjoint((update, keys, values)):
        raise NoProgramError("a layer that uses its cached keys after its attention")
    carried = [node for node in before if node in used_after and node.target is not rows]

    constants = [node for node in before if node.target is rows]
    num_inputs = len(layer.inputs)
    return Programs(
        _part([], before, [query, *update.args, *carried], given, num_inputs),
        _part([attend, *carried], [*constants, *after], output.all_input_nodes, given, num_inputs),
        _whole(layer, [query, *update.args]),
    )


def _whole(layer: Captured, attending: Sequence[Any]) -> LayerPart | None:
    """Return a layer as one program, which attends by the kernel to these queries, keys and values, and those of a
    cache; None if the kernel cannot.
    """
    query, keys, values = (node.meta["val"] for node in attending)
    options = layer.attended.options
    is_usual = query.dtype == keys.dtype == values.dtype and keys.shape[1] == values.shape[1]
    is_grouped = query.shape[1] % keys.shape[1] == 0
    if not is_usual or not is_grouped or options.get("dropout") or is_special(options):
        return None
    graph = with_cache(layer.graph, options.get("scaling") or query.shape[-1] ** -0.5)
    nodes: list[Any] = list(graph.nodes)
    given = [node for node in nodes if node.op == "placeholder"]
    handed, given = given[: len(HANDED)], given[len(HANDED) :]
    computed = [node for node in nodes if node.op == "call_function"]
    return _part(handed, computed, nodes[-1].all_input_nodes, given, len(layer.inputs))


def _part(
    handed: Sequence[Any],
    nodes: Sequence[Any],
    results: Sequence[Any],
    given: Sequence[Any],
    num_inputs: int,
) -> LayerPart:
    """Return a part that computes some nodes; of what is `given` the first are inputs, the others weights."""
    used = {one for node in nodes for one in node.all_input_nodes} | set(results)
    read = [index for index, node in enumerate(given) if node in used]
    program = _program([*handed, *(given[index] for index in read)], nodes, results)
    inputs = [index for index in read if index < num_inputs]
    return LayerPart(program, inputs, [i - num_inputs for i in read if i >= num_inputs])


def _place_in(node: Any, of: Any) -> int | None:
    """Return which of a node's results another is; None if it is none."""
    is_part = node.target is operator.getitem and node.args[0] is of
    return node.args[1] if is_part else None


def _program(inputs: Sequence[Any], nodes: Sequence[Any], results: Sequence[Any]) -> Any:
    places = {node: index for index, node in enumerate(inputs)}
    count = len(inputs)
    operations: list[tuple[Any, list[_Argument]]] = []
    for node in nodes:
        if node.target in (rows, length):
            continue
        if node.target is operator.getitem:
            places[node] = places[node.args[0]] + node.args[1]
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            raise NoProgramError(f"{node.op} {node.target} in a layer")
        operations.append((node.target._schema, list(_arguments(node, places))))
        places[node] = count
        value = node.meta["val"]
        count += len(value) if isinstance(value, list | tuple) else 1
    kept = {places[result] for result in results}
    program = torch.classes.token_recycling.Program()
    last = {
        argument.values[0]: (number, place)
        for number, (_, found) in enumerate(operations)
        for place, argument in enumerate(found)
        if argument.kind == "value"
    }
    for number, (schema, found) in enumerate(operations):
        program.operation(schema.name, schema.overload_name)
        for place, (kind, values) in enumerate(found):
            if kind == "value":
                (value,) = values
                values = (value, last[value] == (number, place) and value not in kept)
            getattr(program, kind)(*values)
    for result in results:
        program.result(places[result])
    return program


class _Argument(NamedTuple):
    """A call of the library's `Program`: its method, and what it is given."""

    kind: str
    values: tuple[Any, ...]


def _arguments(node: Any, places: Mapping[Any, int]) -> Iterator[_Argument]:
    for index, argument in enumerate(node.target._schema.arguments):
        if index < len(node.args):
            value = node.args[index]
        else:
            value = node.kwargs.get(argument.name, argument.default_value)
        of = str(argument.type)
        if isinstance(value, int) and of == "float":
            value = float(value)
        elif isinstance(value, int | float) and of == "Tensor":
            # Without dimensions: it does not change the dtype of what it meets.
            value = torch.tensor(value, dtype=torch.float64 if type(value) is float else None)
        yield from _argument(value, places)


def _argument(value: Any, places: Mapping[Any, int]) -> Iterator[_Argument]:
    if isinstance(value, list | tuple):
        is_tensors = any(isinstance(one, fx.Node) and one.target is not rows for one in value)
        yield _Argument("list", (len(value), is_tensors))
        for one in value:
            yield from _argument(one, places)
    elif not isinstance(value, fx.Node):
        yield _Argument("constant", (value,))
    elif value.target is rows:
        yield _Argument("rows", value.args)
    elif value.target is length:
        yield _Argument("length", ())
    else:
        yield _Argument("value", (places[value],))
