"""Mixers: the modules that read and write states, and how they run over a draft tree.

A recurrent mixer reads rows in order, from one state to the next, so it cannot read a tree as
attention does, with a mask. But a row needs its parent's state alone: the nodes of one depth are
independent of each other. So a mixer reads a tree level by level, each level as a batch of single
tokens from their parents' states: as many calls as the tree is deep, whatever its number of nodes.
The states after all nodes are there when the accepted ones are known. Mixers whose convolution and
recurrence are known (`model.backends.states.scans`) do the same in one call, in which the levels are but
those of the recurrence. All other parts of the model read the tree in one pass, as ever.

The mixers are found by watching one pass, and are not known by name. The single-token form is that
of plain decoding, so states after a node are plain decoding's, up to the rounding of a batch.

Shapes: N nodes, n nodes of one depth, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn

from ...engine.levels import Level, LevelTree
from ...machine.own_forwards import OwnForwards
from .layers import (
    CONTAINERS,
    HAS_STATE_LAYERS,
    Branches,
    State,
    StateLayer,
    WatchedContainer,
    copied,
    mapped,
    selected,
)
from .scans import ScanningForward, TreeScan, scannable

# Methods of transformers' caches through which mixers reach their states; the last two are MiniMax's.
READERS = (
    *("get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"),
    *("get_linear_cache", "set_linear_cache"),
)
# Most memory for the states after all nodes of a tree, in bytes. Beyond it, those of scanned mixers are
# computed again for the last accepted node: a few small operations a layer.
MOST_KEPT = 2**28


class Mixers:
    """The mixers of a model.

    Args:
        modules: by the index of their layer in the cache.

    Attributes:
        are_scanned: whether those of known kinds read a tree in one call.
    """

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self._modules = modules
        known = modules if HAS_STATE_LAYERS else {}  # others' states have names of their own
        kinds = {index: scannable(module) for index, module in known.items()}
        self._scanning = {
            index: ScanningForward(modules[index], kind)
            for index, kind in kinds.items()
            if kind is not None
        }
        self.are_scanned = bool(self._scanning)

    @contextmanager
    def over(self, tree: LevelTree, layers: Sequence[Any], base: int) -> Iterator[Branches]:
        """Within the block mixers read a pass as this tree, after `base` rows of a cache of these layers, whose
        states they leave as they were.
        """
        branches = Branches(base)
        functions: dict[nn.Module, Callable[..., Any]] = {}
        try:
            for index, module in self._modules.items():
                layer: StateLayer = layers[index]
                run: Callable[..., Any]
                if self.are_scanned and index in self._scanning and layer.is_filled:
                    num_bytes = layer.num_bytes * len(self._modules) * tree.num_nodes
                    scan = TreeScan(tree, layer, keeps_states=num_bytes <= MOST_KEPT)
                    branches.after[index] = scan.after
                    run = partial(_scan, tree, layer, self._scanning[index].calling(scan))
                else:
                    levels = Levels(tree, layer, base)
                    branches.after[index] = levels.after
                    run = partial(levels.run, module.forward)
                functions[module] = run
            with OwnForwards(functions, replaces_users=True).patched():
                yield branches
        finally:
            for scanning in self._scanning.values():
                scanning.release()


def _scan(
    tree: LevelTree, layer: StateLayer, forward: Callable[..., Any], *arguments: Any, **options: Any
) -> Any:
    """Run a mixer over the rows [1, N, ...] of its arguments in one call; return its outputs for them."""
    arguments, options = _by_level(arguments, tree), _by_level(options, tree)
    layer.is_reading_tree = True
    try:
        outputs = forward(*arguments, **options)
    finally:
        layer.is_reading_tree = False
    return _ordered(outputs, tree, tree.back)


class Levels:
    """A mixer's calls for the levels of a tree, each a batch of single tokens."""

    def __init__(self, tree: LevelTree, layer: StateLayer, base: int) -> None:
        self._tree = tree
        self._layer = layer
        self._base = base
        self._states: list[State] = []  # after the nodes of each level

    def after(self, node: int) -> State:
        depth, place = self._tree.place_of(node)
        found: State = mapped(self._states[depth], lambda tensor: tensor[place : place + 1].clone())
        return found

    def run(self, forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Run a mixer as `_scan`, level by level."""
        tree, layer, before = self._tree, self._layer, self._layer.state()
        arguments, options = _by_level(arguments, tree), _by_level(options, tree)
        outputs, first = [], options.get("cache_position")  # of transformers 4.57
        for depth, level in enumerate(tree.levels):
            state = selected(self._states[-1], level.parents) if self._states else copied(before)
            layer.set_state(state)
            rows = partial(_rows, tree.num_nodes, level)
            if first is not None and (self._base or depth):  # a sequence begins as a prompt does
                options["cache_position"] = first[:1] + depth
            outputs.append(forward(*mapped(arguments, rows), **mapped(options, rows)))
            self._states.append(layer.state())
        layer.set_state(before)
        return _ordered(_joined(outputs), tree, tree.back)


def _rows(num_nodes: int, level: Level, tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a level as a batch [n, 1, ...]; a tensor that has no rows as it is."""
    return tensor[0, level.begin : level.end, None] if _has_rows(tensor, num_nodes) else tensor


def _has_rows(tensor: torch.Tensor, num_nodes: int) -> bool:
    return tensor.ndim >= 2 and tensor.shape[:2] == (1, num_nodes)


def _by_level(value: Any, tree: LevelTree) -> Any:
    """Return arguments of a mixer with their rows in the order of the levels, and without the tree's mask
    [1, 1, N, T], which some models give to all layers alike.
    """
    mask = (1, 1, tree.num_nodes)
    unmasked = mapped(value, lambda one: None if one.ndim == 4 and one.shape[:3] == mask else one)
    return _ordered(unmasked, tree, tree.order)


def _ordered(value: Any, tree: LevelTree, order: torch.Tensor | None) -> Any:
    """Return a value with the rows [1, N, ...] of all its tensors in this order; None: as they are."""
    if order is None:
        return value
    return mapped(
        value,
        lambda tensor: (
            tensor.index_select(1, order.to(tensor.device))
            if _has_rows(tensor, tree.num_nodes)
            else tensor
        ),
    )


def _joined(outputs: Sequence[Any]) -> Any:
    """Return the outputs [n, 1, D] of all levels as one [1, N, D]."""
    if isinstance(outputs[0], tuple):
        return tuple(_joined(parts) for parts in zip(*outputs, strict=True))
    if not isinstance(outputs[0], torch.Tensor):
        return outputs[0]
    return torch.cat([output[:, 0] for output in outputs])[None]


def find_mixers(model: nn.Module, cache: Any, run: Callable[[], object]) -> dict[int, nn.Module]:
    """Return the module that reads the states of each layer, by the layer's index.

    Args:
        model: the model.
        cache: filled by the model.
        run: passes a token through the model, with this cache.

    Raises:
        ValueError: if two modules read the states of one layer.
    """
    entered: list[nn.Module] = []
    found: dict[int, nn.Module] = {}
    thread = get_ident()  # others may run the model meanwhile

    def report(index: int) -> None:
        if found.setdefault(index, entered[-1]) is not entered[-1]:
            raise ValueError(f"the states of layer {index} are read by more than one module")

    def watched(method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        whole = (value for value in arguments if isinstance(value, int))
        index = options.get("layer_idx", next(whole, None))
        if isinstance(index, int):
            report(index)
        return method(*arguments, **options)

    def enter(module: nn.Module, *_: Any) -> None:
        if get_ident() == thread:
            entered.append(module)

    def leave(*_: Any) -> None:
        if get_ident() == thread:
            entered.pop()

    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        for name in filter(partial(hasattr, cache), READERS):
            setattr(cache, name, partial(watched, getattr(cache, name)))
            stack.callback(delattr, cache, name)
        for name in filter(partial(hasattr, cache), CONTAINERS):
            container = getattr(cache, name)
            setattr(cache, name, WatchedContainer(container, report))
            stack.callback(setattr, cache, name, container)
        run()
    return found
