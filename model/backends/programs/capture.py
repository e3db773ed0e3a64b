"""Captures the computation of a decoder layer, the stock module, as a graph of torch's operations.

The layer is called as in a pass, twice, with two numbers of rows. Numbers in the graph that differ between the
two are numbers of rows; if anything else differs, the layer has no program. Two places stay with Python, each
exactly once in a layer: where its rows go into the cache, and where it attends.

Shapes: n rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ...kernels.norms import KINDS, FusedNorm
from ...kernels.registered_attention import register_attention
from ...machine.locks import SharedLock
from ...machine.own_forwards import OwnForwards, attending

# The name under which attention is captured.
CAPTURED = "captured"
# Operations after which another sequence may go another way, or which draw numbers.
DATA_DEPENDENT = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
PLAIN_VALUES = (bool, int, float, str, type(None))


class NoProgramError(Exception):
    """A layer has no program; the message says why in one line."""


class Attended(NamedTuple):
    """The one call of attention in a layer: the name of the module within it, and its constant arguments."""

    module: str
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Captured:
    """A layer's graph."""

    graph: fx.Graph  # nodes in order; its placeholders are `inputs`, then `weights`
    # Names of the tensors of a call, "" its rows: an argument's, or (argument, index) in a tuple of tensors.
    inputs: tuple[str | tuple[str, int], ...]
    weights: tuple[str, ...]  # names of parameters and buffers within the layer
    constants: dict[str, Any]  # the other arguments of a call
    cache: str  # name of the argument that is the cache
    attended: Attended
    is_tuple: bool  # whether the layer returns a tuple, whose first part is its rows


class LayerCall(NamedTuple):
    """The arguments of a layer in a pass: its rows [1, n, D], and the named ones."""

    rows: torch.Tensor
    named: dict[str, Any]


class _Passed:
    """Stands for an argument that a layer hands on to its attention and does not look at."""


class _Cache:
    """Stands for the cache: only takes rows."""

    def __init__(self) -> None:
        self.indices: list[int] = []

    def update(self, keys: Any, values: Any, layer_idx: int, *rest: Any, **more: Any) -> Any:
        self.indices.append(layer_idx)
        return torch.ops.token_recycling.captured_update(keys, values)


class _Attention:
    """The attention function of a capture; notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, Any, dict[str, Any]]] = []

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        self.calls.append((module, attention_mask, options))
        return torch.ops.token_recycling.captured_attention(query, key, value), None


_ATTENTION = _Attention()
# A capture replaces the call of all modules of the process, and puts back what it found.
_ONE_AT_A_TIME = SharedLock()
register_attention(CAPTURED, _ATTENTION)


def _split_arguments(
    named: Mapping[str, Any],
) -> tuple[dict[str | tuple[str, int], torch.Tensor], dict[str, Any]]:
    """Return the tensors among a call's named arguments, and the others."""
    tensors: dict[str | tuple[str, int], torch.Tensor] = {}
    others: dict[str, Any] = {}
    for name, value in named.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, tuple) and value and all(torch.is_tensor(one) for one in value):
            tensors.update({(name, index): one for index, one in enumerate(value)})
        else:
            others[name] = value
    return tensors, others


def captured(
    layer: nn.Module,
    index: int,
    calls: tuple[LayerCall, LayerCall],
    cache_argument: str,
    config: Any,
    norms: Mapping[nn.Module, FusedNorm],
) -> Captured:
    """Return the graph of a decoder layer, which caches under this index, from calls with two numbers of rows.

    Raises:
        NoProgramError: if it computes anything that a program cannot.
    """
    with _ONE_AT_A_TIME:
        first, second = (
            _capture(layer, index, call, cache_argument, config, norms) for call in calls
        )
    graph = _joined(first.graph, second.graph, *(call.rows.shape[1] for call in calls))
    return replace(first, graph=graph)


def _capture(
    layer: nn.Module,
    index: int,
    call: LayerCall,
    cache_argument: str,
    config: Any,
    norms: Mapping[nn.Module, FusedNorm],
) -> Captured:
    mask, cache = _Passed(), _Cache()
    tensors, constants = _split_arguments(
        {name: value for name, value in call.named.items() if name != "attention_mask"}
    )
    constants.pop(cache_argument, None)
    if unknown := [name for name, one in constants.items() if not isinstance(one, PLAIN_VALUES)]:
        raise NoProgramError(f"argument {unknown[0]} of a layer")
    weights = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    is_tuple = False

    def run(rows: torch.Tensor, given: list[torch.Tensor], of_layer: list[torch.Tensor]) -> Any:
        nonlocal is_tuple
        named: dict[str, Any] = dict(constants)
        for name, value in zip(tensors, given, strict=True):
            if isinstance(name, tuple):
                named[name[0]] = (*named.get(name[0], ()), value)
            else:
                named[name] = value
        named |= {"attention_mask": mask, cache_argument: cache}
        found = torch.func.functional_call(
            layer, dict(zip(weights, of_layer, strict=True)), (rows,), named
        )
        is_tuple = isinstance(found, tuple)
        if is_tuple and any(part is not None for part in found[1:]):
            raise NoProgramError("a layer returns more than its rows")
        return found[0] if is_tuple else found

    _ATTENTION.calls.clear()
    # Without it make_fx makes a mode of its own for each operation, which takes half of its time.
    shared = tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True)))
    forwards = OwnForwards(_norm_forwards(norms)).patched()
    with attending(config, CAPTURED), forwards, torch.no_grad(), shared:
        try:
            module = make_fx(run, pre_dispatch=True)(
                call.rows, list(tensors.values()), list(weights.values())
            )
        except NoProgramError:
            raise
        except Exception as error:  # a layer that looks at mask or cache may raise anything
            reason = (str(error).splitlines() or [""])[0]
            raise NoProgramError(f"{type(error).__name__}: {reason}") from error
    attended = _attended(layer, index, mask, cache, list(tensors.values()))
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.dropout.default):
        if not node.args[2]:  # not in training
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in graph.nodes:
        tags = set(getattr(node.target, "tags", ()))
        if tags & DATA_DEPENDENT:
            raise NoProgramError(f"{node.target}, whose result depends on the numbers it reads")
    graph.eliminate_dead_code()
    inputs = ("", *tensors)
    return Captured(graph, inputs, tuple(weights), constants, cache_argument, attended, is_tuple)


def _norm_forwards(norms: Mapping[nn.Module, FusedNorm]) -> dict[nn.Module, Any]:
    def forward(norm: FusedNorm) -> Any:
        kind = KINDS.index(norm.kind)

        def normed(rows: torch.Tensor) -> torch.Tensor:
            weight = norm.module._parameters[norm.weight] if norm.weight else None
            epsilon = vars(norm.module)[norm.epsilon]
            found: torch.Tensor = torch.ops.token_recycling.norm(rows, weight, epsilon, kind)
            return found

        return normed

    return {module: forward(norm) for module, norm in norms.items()}


def _attended(
    layer: nn.Module, index: int, mask: Any, cache: _Cache, tensors: Sequence[torch.Tensor]
) -> Attended:
    """Return the one call of attention; raise NoProgramError if there is not one, after one update of the cache."""
    if len(_ATTENTION.calls) != 1 or cache.indices != [index]:
        raise NoProgramError(
            f"a layer that attends {len(_ATTENTION.calls)} times and caches as {cache.indices or 'none'}"
        )
    module, got_mask, options = _ATTENTION.calls.pop()
    if got_mask is not mask:
        raise NoProgramError("a layer that changes its mask")
    options = dict(options)
    for name, value in [*options.items()]:
        if isinstance(value, torch.Tensor):
            del options[name]  # an argument of the call, such as the positions
        elif not isinstance(value, PLAIN_VALUES):
            raise NoProgramError(f"argument {name} of the attention")
    name = next(name for name, one in layer.named_modules() if one is module)
    return Attended(name, options)


def rows(factor: int, more: int) -> int:
    """Stands in a graph for the whole number factor * n + more."""
    raise NotImplementedError


def length() -> int:
    """Stands in a graph for the number of rows that the cache has in use."""
    raise NotImplementedError


def _joined(first: fx.Graph, second: fx.Graph, few: int, many: int) -> fx.Graph:
    """Return the first graph with its numbers of rows as `rows`; both are of the same layer.

    Raises:
        NoProgramError: if they differ in anything else.
    """
    differs = NoProgramError("a layer that computes otherwise for other numbers of rows")
    nodes, others = list(first.nodes), list(second.nodes)
    if [node.target for node in nodes] != [node.target for node in others]:
        raise differs
    partner = dict(zip(nodes, others, strict=True))

    def join(one: Any, other: Any) -> Any:
        if isinstance(one, fx.Node):
            if partner[one] is other:
                return one
        elif isinstance(one, list | tuple) and len(one) == len(other):
            return type(one)(join(*pair) for pair in zip(one, other, strict=True))
        elif one == other:
            return one
        elif type(one) is int and not (other - one) % (many - few):
            factor = (other - one) // (many - few)
            return first.call_function(rows, (factor, one - factor * few))
        raise differs

    for node, other in partner.items():
        with first.inserting_before(node):
            node.args = join(node.args, other.args)
            node.kwargs = {
                name: join(node.kwargs[name], other.kwargs[name]) for name in node.kwargs
            }
    return first
