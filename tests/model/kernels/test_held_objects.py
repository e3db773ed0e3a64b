"""What a tree of objects holds is told from what it held, by the compiled comparison and by Python's.

Run: pytest tests/model/kernels/test_held_objects.py
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from model.kernels import held_objects
from model.kernels.held_objects import HeldObjects


class Node:
    def __init__(self) -> None:
        self.number = 1000.5
        self.unseen = object()
        self.table: OrderedDict[str, Any] = OrderedDict(weight=torch.ones(3), bias=None)
        self.names = ["a", "b"]
        self.nested = {"deep": {"list": [1, {"last": "x"}]}}
        self.children: dict[str, Node] = {}


@pytest.fixture(params=["compiled", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(held_objects, "_compiled", lambda: None)


def tree() -> Node:
    root, child = Node(), Node()
    root.children["first"] = child
    child.children["back"] = root  # a circle
    return root


class Other(Node):
    pass


CHANGES: dict[str, Callable[[Node], object]] = {
    "number": lambda one: setattr(one, "number", 1001.5),
    "added": lambda one: setattr(one, "more", 1),
    "removed": lambda one: delattr(one, "number"),
    "entry": lambda one: one.table.update(bias=torch.ones(1)),
    "new entry": lambda one: one.table.update(scale=None),
    "tensor": lambda one: one.table.update(weight=torch.ones(3)),
    "memory": lambda one: setattr(one.table["weight"], "data", torch.ones(3)),
    "item": lambda one: one.names.__setitem__(1, "c"),
    "longer list": lambda one: one.names.append("c"),
    "deep": lambda one: one.nested["deep"]["list"][1].update(last="y"),
    "class": lambda one: setattr(one, "__class__", Other),
    "exchanged": lambda one: one.children.update(back=Node(), first=Node()),
    "moved": lambda one: vars(one).update(number=vars(one).pop("number") + 1),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("is_child", [False, True], ids=["root", "child"])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(change: str, is_child: bool) -> None:
    root = tree()
    held = HeldObjects([root, {"a": 1}], (Node,), ("unseen",))
    assert held.are_same()
    root.unseen = object()
    root.table["weight"].add_(1)
    assert held.are_same(), "neither what is ignored nor the numbers count"
    CHANGES[change](root.children["first"] if is_child else root)
    assert not held.are_same()
    assert HeldObjects([root, {"a": 1}], (Node,), ("unseen",)).are_same()


@pytest.mark.usefixtures("way")
def test_what_was_recorded_is_noted_with_its_path() -> None:
    noted: dict[tuple[Any, ...], Any] = {}
    HeldObjects([tree()], (Node,), ("unseen",), noted.__setitem__)
    assert noted[0, "children", "first", "nested", "deep", "list", 1, "last"] == "x"
    assert noted[0, "number"] == 1000.5
    assert (0, "unseen") not in noted


@pytest.mark.usefixtures("way")
def test_what_has_gone_is_not_looked_at() -> None:
    root = tree()
    held = HeldObjects([root], (Node,))
    del root.children["first"].children["back"], root.children["first"].table["weight"]
    root.children["first"] = Node()
    assert not held.are_same()
