"""A bounded Aho-Corasick automaton over the n-grams of all texts, and the continuations it finds.

The states are the nodes of a trie of n-grams, each with a count. A state's link leads to the state of
its longest proper suffix. The states after a text's last tokens, followed along the links, are
the places where earlier texts said the same; what is below them in the trie followed there. A text
keeps its state itself, so that several texts may be under way.

The number of nodes is bounded: a new node takes the place of the one that was touched longest ago.
That may be an inner node, whose children are then out of the trie; and links that lead to a node
keep leading to it when it stands for something else. Links are exact after `build_links`; new nodes
and those on a touched path link to the root until the next one. All of this is as in the authors'
code, so that drafts are the same.

Source: A. Aho and M. Corasick, Efficient string matching, Communications of the ACM 18, 1975.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappush, heapreplace
from typing import NamedTuple

import torch

ROOT = 0
NOTHING = -1  # parent of the root, and its token
# Shortest match that is continued: the last token alone is left to the rows.
MIN_DEPTH = 2
COLUMNS = ("tokens", "parents", "counts", "depths", "links")


class PathTree:
    """Paths from one root, merged: no node has two children with the same token."""

    def __init__(self, root: int) -> None:
        self.tokens = [root]  # of the nodes in the order in which they were added
        self._children: list[dict[int, int]] = [{}]

    def find(self, node: int, token: int) -> int | None:
        return self._children[node].get(token)

    def child(self, node: int, token: int) -> int:
        """Return the child of a node with this token, added if there is none."""
        found = self.find(node, token)
        if found is None:
            found = self._children[node][token] = len(self.tokens)
            self.tokens.append(token)
            self._children.append({})
        return found

    def flat(self) -> tuple[list[int], tuple[int, ...]]:
        """Return tokens and parents of the nodes level by level; of siblings the last one added comes first."""
        tokens, parents, order = [self.tokens[0]], [-1], [0]
        for place, node in enumerate(order):  # grows meanwhile
            for child in reversed(self._children[node].values()):
                order.append(child)
                parents.append(place)
                tokens.append(self.tokens[child])
        return tokens, tuple(parents)


class _Place(NamedTuple):
    """A node that may be drafted. The least of several places is the first to be left out."""

    frequency: int  # how often its n-gram was added
    minus_depth: int  # of the node in the trie, negated
    node: int  # a later node wins
    start: int  # the state whose continuation it belongs to


class Retrieved(NamedTuple):
    state: int  # of the text with the draft's root
    end: int  # the node of the draft that the last path ends in; the root's if there is none
    depth: int  # of that node in the draft


class Automaton:
    """The automaton of at most `max_nodes` nodes, root included: more than the tokens of an n-gram."""

    def __init__(self, max_nodes: int) -> None:
        self._max_nodes = max_nodes
        self.clear()

    def clear(self) -> None:
        self.tokens, self.parents = [NOTHING], [NOTHING]
        self.counts, self.depths, self.links = [0], [0], [ROOT]
        self.children: list[dict[int, int]] = [{}]  # by token; the newest last
        # All nodes, the one touched longest ago first.
        self._touched: OrderedDict[int, None] = OrderedDict({ROOT: None})

    def add(self, ngram: Iterable[int]) -> None:
        """Count an n-gram and its beginnings."""
        children, counts, touch = self.children, self.counts, self._touched.move_to_end
        node = ROOT
        counts[ROOT] += 1
        touch(ROOT)
        for token in ngram:
            child = children[node].get(token)
            node = self._new_node(node, token) if child is None else child
            counts[node] += 1
            touch(node)

    def build_links(self) -> None:
        """Link every node to the node of its longest proper suffix."""
        children, links = self.children, self.links
        order = list(children[ROOT].values())
        for node in order:
            links[node] = ROOT
        for node in order:  # grows meanwhile
            for token, child in children[node].items():
                suffix = links[node]
                while suffix != ROOT and token not in children[suffix]:
                    suffix = links[suffix]
                links[child] = children[suffix].get(token, ROOT)
                order.append(child)

    def advance(self, state: int, tokens: Iterable[int]) -> int:
        """Return the state of a text after further tokens; it begins at the root."""
        children, links, touch = self.children, self.links, self._touched.move_to_end
        node = self._known(state)
        for token in tokens:
            touch(node)
            if token not in children[node]:
                while node != ROOT and token not in children[node]:
                    node = links[node]
                self._touch_path(node)
            node = children[node].get(token, ROOT)
        touch(node)
        return node

    def retrieve(
        self, state: int, tree: PathTree, num_nodes: int, max_depth: int, is_chain: bool
    ) -> Retrieved:
        """Follow the token of the draft's root and add what followed it in earlier places.

        Args:
            state: of the text before the root.
            tree: the draft, a root alone.
            num_nodes: most nodes that are chosen; the states count, though all of them become the root.
            max_depth: depth of the deepest node allowed.
            is_chain: whether only the longest match is continued, by the most frequent tokens.
        """
        state, starts = self._matches(self._known(state), tree.tokens[0], is_chain)
        chosen = self._most_frequent(starts, num_nodes, max_depth, is_chain)
        inner = {(self.parents[place.node], place.start) for place in chosen}
        end, path = 0, list[int]()
        for place in sorted(chosen, key=lambda place: (place.node, place.start), reverse=True):
            if (place.node, place.start) in inner:
                continue
            end, path, node = 0, [], place.node
            while node != place.start:
                path.append(self.tokens[node])
                node = self.parents[node]
            for token in reversed(path):
                end = tree.child(end, token)
        return Retrieved(state, end, len(path))

    def _known(self, state: int) -> int:
        """Return a text's state; the root if nodes were forgotten since."""
        return state if state < len(self.tokens) else ROOT

    def _matches(self, state: int, token: int, is_chain: bool) -> tuple[int, list[int]]:
        """Return the state after the text and this token, and those that are continued, the longest match first.

        A chain needs the longest only. Without any the state stays where it is.
        """
        children, depths = self.children, self.depths
        found, node, after = list[int](), state, None
        while True:
            child = children[node].get(token)
            if child is not None:
                if after is None:
                    after = child
                if depths[child] >= MIN_DEPTH and not (found and is_chain):
                    found.append(child)
            if node == ROOT:
                break
            node = self.links[node]
        for child in found:
            self._touch_path(child)
        return state if after is None else after, found

    def _most_frequent(
        self, starts: Sequence[int], num_nodes: int, max_depth: int, is_chain: bool
    ) -> list[_Place]:
        """Return the nodes with the largest counts below the starts, and the starts."""
        counts, depths, children = self.counts, self.depths, self.children
        chosen: list[_Place] = []  # a heap
        layer = [(start, start) for start in starts]
        for depth in range(max_depth + 1):
            is_changed = False
            for node, start in layer:
                place = _Place(counts[node], -depths[node], node, start)
                if len(chosen) < num_nodes:
                    heappush(chosen, place)
                    is_changed = True
                elif place.frequency > chosen[0].frequency:
                    heapreplace(chosen, place)
                    is_changed = True
            if not is_changed or depth == max_depth:  # counts fall from a node to its children
                break
            layer = [
                (child, start)
                for node, start in layer
                for child in reversed(children[node].values())
            ]
            if is_chain and layer:
                layer = [max(layer, key=lambda entry: counts[entry[0]])]
        return chosen

    def _new_node(self, parent: int, token: int) -> int:
        """Add a node, which takes the place of the one touched longest ago if there is no room."""
        if len(self.tokens) < self._max_nodes:
            node = len(self.tokens)
            for column in (self.tokens, self.parents, self.counts, self.depths, self.links):
                column.append(0)
            self.children.append({})
            self._touched[node] = None
        else:
            node = next(iter(self._touched))
            siblings = self.children[self.parents[node]]
            if siblings.get(self.tokens[node]) == node:
                del siblings[self.tokens[node]]
            self.children[node] = {}
        self.tokens[node], self.parents[node], self.counts[node] = token, parent, 0
        self.depths[node], self.links[node] = self.depths[parent] + 1, ROOT
        self.children[parent][token] = node
        return node

    def _touch_path(self, node: int) -> None:
        """Touch a node and all above it, the root last; they link to the root from now on."""
        parents, links, touch = self.parents, self.links, self._touched.move_to_end
        while node != NOTHING:
            links[node] = ROOT
            touch(node)
            node = parents[node]

    def state(self) -> dict[str, torch.Tensor]:
        """Return the automaton: columns [M, 5] of M nodes, edges in order [E, 2], nodes by touch [M]."""
        columns = [getattr(self, name) for name in COLUMNS]
        edges = [
            (node, child) for node, below in enumerate(self.children) for child in below.values()
        ]
        return {
            "nodes": torch.tensor(columns, dtype=torch.int32).T.contiguous(),
            "edges": torch.tensor(edges, dtype=torch.int32).reshape(-1, 2),
            "touched": torch.tensor(list(self._touched), dtype=torch.int32),
        }

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a `state`, or raise ValueError if it does not fit."""
        nodes, edges, touched = (state[name] for name in ("nodes", "edges", "touched"))
        count = len(touched)
        if not _are_nodes(nodes, edges, touched) or count > self._max_nodes:
            raise ValueError(
                "automaton: got nodes, edges or an order that do not form an automaton of at most "
                f"{self._max_nodes} nodes; allowed: what was saved with the same options"
            )
        for name, column in zip(COLUMNS, nodes.T.tolist(), strict=True):
            setattr(self, name, column)
        self.children = [{} for _ in range(count)]
        for node, child in edges.tolist():
            self.children[node][self.tokens[child]] = child
        self._touched = OrderedDict.fromkeys(touched.tolist())


def _are_nodes(nodes: torch.Tensor, edges: torch.Tensor, touched: torch.Tensor) -> bool:
    count = len(touched)
    if any(tensor.dtype != torch.int32 for tensor in (nodes, edges, touched)):
        return False
    if tuple(nodes.shape) != (count, len(COLUMNS)) or edges.shape[1:] != (2,) or count == 0:
        return False
    if not torch.equal(touched.sort().values, torch.arange(count, dtype=torch.int32)):
        return False
    tokens, parents, links = nodes[:, 0], nodes[:, 1], nodes[:, 4]
    ends = torch.cat((parents[1:], links, edges.flatten()))
    if nodes[0, :2].tolist() != [NOTHING, NOTHING] or bool((tokens[1:] < 0).any()):
        return False
    if not bool(((ends >= 0) & (ends < count)).all()):
        return False
    is_tree = torch.equal(parents[edges[:, 1].long()], edges[:, 0])
    return is_tree and _leads_to_root(parents.clamp(min=ROOT)) and _leads_to_root(links)


def _leads_to_root(targets: torch.Tensor) -> bool:
    """Whether going on from node to target ends at the root from everywhere, [M]."""
    targets = targets.long()
    for _ in range(len(targets).bit_length()):
        targets = targets[targets]  # twice as many steps as before
    return not bool(targets.any())
