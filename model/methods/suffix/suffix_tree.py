"""A tree of all suffixes of several texts that counts how often every string occurs.

Only strings of at most `depth` tokens are kept. A node stands for a run of tokens that occurs equally
often from its first token to its last; its count is the number of places where it occurs after the
path that leads to it. So the count of a child, over that of its parent, is how often the one followed
the other.

The end of every suffix of an open text is kept: the places of all matches are known without a search.
Appending a token moves each end that has occurred elsewhere; the other ends lie in leaves, whose run
grows with its text. A copied passage of n tokens thus costs n moves a token, n bounded by the depth.
Where another text reaches such an end in a leaf, the leaf stops growing, and the end moves from then on.

The children of a node are ranked by count. Of equal counts the order follows from the order of events:
a child whose count rises moves before all children of the rank above it (of the same count first).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple
from weakref import WeakSet

NO_CHILDREN: Mapping[int, Node] = MappingProxyType({})


class Node:
    """A run of tokens that is read or skipped as one, `text[begin:end]`.

    Attributes:
        count: places where the path to the end of the run occurs.
        text: the last text that holds the path; it shows the run, and before it the rest of the path.
        begin: where the run begins.
        end: where it ends; past the end of the text where the run grows with it.
        parent: the node before; None for the root.
        children: nodes by the first token of their run.
        ranked: the children, most frequent first; not kept for the root.
    """

    __slots__ = ("begin", "children", "count", "end", "parent", "ranked", "text")

    def __init__(self, count: int, text: list[int], begin: int, end: int, parent: Node | None):
        self.count, self.text, self.begin, self.end = count, text, begin, end
        self.parent = parent
        self.children: Mapping[int, Node] = NO_CHILDREN
        self.ranked: list[Node] = []

    @property
    def length(self) -> int:
        return min(self.end, len(self.text)) - self.begin

    def run(self, begin: int, most: int) -> list[int]:
        """Return up to `most` tokens of the run from a place in the text."""
        return self.text[begin : min(self.end, begin + most)]

    def show(self, text: list[int], begin: int, end: int) -> None:
        """Read the run from a newer text."""
        self.text, self.begin, self.end = text, begin, end


class TreePlace(NamedTuple):
    node: Node  # the node in whose run it ends
    position: int  # where the run goes on, in the text of the node


class OpenText:
    """A text that grows in a tree, until nobody holds this object.

    Attributes:
        tokens: of the text.
        ends: nodes where its suffixes end, as far as they have occurred elsewhere too: the longest first, the
            empty one, which is the root, last.
    """

    def __init__(self, tree: SuffixTree) -> None:
        self._tree = tree
        self.begin()

    def begin(self) -> None:
        self.tokens: list[int] = []
        self.ends = [self._tree.root]

    def extend(self, tokens: Sequence[int]) -> None:
        self._tree.extend(self, tokens)

    def places(self, context: Sequence[int]) -> Iterator[TreePlace]:
        """Yield the places of a context's suffixes of 1, 2, ... tokens, as far as they have occurred.

        The context ends as this text does.
        """
        known = min(len(self.ends), len(context))
        for length in range(1, known):
            node = self.ends[-1 - length]
            yield TreePlace(node, node.end)
        # Suffixes that begin before this text are looked up, if they can occur at all.
        if known <= len(self.tokens):
            return
        for length in range(known, len(context)):
            place = self._tree.find(context[len(context) - length :])
            if place is None:
                return
            yield place


class SuffixTree:
    """Counts of all strings of up to `depth` tokens in several texts."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._open: WeakSet[OpenText] = WeakSet()
        # Open texts whose ends in leaves a token of another text has reached, and these leaves.
        self._reached: list[tuple[OpenText, Node]] = []
        self.clear()

    def clear(self) -> None:
        """Take all texts out; open ones begin anew."""
        self.root = Node(0, [], 0, 0, None)
        self.num_nodes = 0  # without the root
        for text in self._open:
            text.begin()

    def open_text(self) -> OpenText:
        """Begin a text. Several may be open."""
        text = OpenText(self)
        self._open.add(text)
        return text

    def extend(self, text: OpenText, tokens: Sequence[int]) -> None:
        whole = text.tokens
        for token in tokens:
            whole.append(token)
            # Where the longest suffix begins that occurred elsewhere.
            start = len(whole) - len(text.ends)
            moved = [
                self._moved(whole, node, token, start + place)
                for place, node in enumerate(text.ends)
            ]
            text.ends = [*filter(None, moved), self.root]
            if len(text.ends) > self._depth:  # the longest cannot grow
                del text.ends[0]
            while self._reached:  # ends of longer suffixes first
                other, leaf = self._reached.pop()
                other.ends.insert(0, leaf)

    def remove(self, text: list[int]) -> None:
        """Take the tokens of a text out: of the oldest one. If it is open, it begins anew."""
        for each in self._open:
            if each.tokens is text:
                each.begin()
        for start in range(len(text)):
            node, index = self.root, start
            while index < len(text):
                child = node.children.get(text[index])
                if child is None:
                    break
                if child.count == 1:  # a leaf
                    del node.children[text[index]]  # type: ignore[attr-defined]
                    if node.parent is not None:
                        node.ranked.remove(child)
                    self.num_nodes -= 1
                    break
                _fall(node, child)
                index += child.length
                node = child
            self._join(node)
        for each in self._open:
            self._leave_to_leaves(each)

    def find(self, string: Sequence[int]) -> TreePlace | None:
        """Return where a string ends; None if it does not occur."""
        node, index, end = self.root, 0, 0
        while index < len(string):
            child = node.children.get(string[index])
            if child is None:
                return None
            run = child.run(child.begin, len(string) - index)
            if run != list(string[index : index + len(run)]):
                return None
            node, index, end = child, index + len(run), child.begin + len(run)
        return TreePlace(node, end)

    def _moved(self, text: list[int], node: Node, token: int, start: int) -> Node | None:
        """Return where a text's suffix from `start`, which ended at `node`, ends now; None if in its own leaf."""
        end = len(text)
        child = node.children.get(token)
        if child is None:
            self._add(node, token, Node(1, text, end - 1, start + self._depth, node))
            return None
        if child.count == 1 and child.end > len(child.text) == child.begin + 1:
            # The whole rest of a leaf that may grow with another text.
            self._reached += ((each, child) for each in self._open if each.tokens is child.text)
        if node.parent is not None and node.count == child.count + 1:
            return self._lengthened(text, node, child)
        if child.length > 1:
            child = self._split(node, child, token)
        _rise(node, child)
        child.show(text, end - 1, end)
        return child

    def _add(self, node: Node, token: int, child: Node) -> None:
        if not node.children:
            node.children = {}
        node.children[token] = child  # type: ignore[index]
        if node.parent is not None:
            node.ranked.append(child)
        self.num_nodes += 1

    def _lengthened(self, text: list[int], node: Node, child: Node) -> Node:
        """Return the node after its suffix took the first token of the only child, which is in its run now."""
        end, length = len(text), node.length + 1
        if child.length == 1:
            child.count += 1
            child.show(text, end - length, end)
            _replace(node, child)
            self.num_nodes -= 1
            return child
        node.show(text, end - length, end)
        child.begin += 1
        node.children = {child.text[child.begin]: child}
        return node

    def _split(self, node: Node, child: Node, token: int) -> Node:
        """Return a new node of the child's first token, between `node` and the rest of the child."""
        first = Node(child.count, child.text, child.begin, child.begin + 1, node)
        _replace(child, first)
        child.begin += 1
        child.parent = first
        first.children, first.ranked = {child.text[child.begin]: child}, [child]
        self.num_nodes += 1
        return first

    def _leave_to_leaves(self, text: OpenText) -> None:
        """Let leaves grow with the suffixes of a text that occur nowhere else any more."""
        tokens = text.tokens
        while len(text.ends) > 1 and text.ends[0].count == 1:
            length, leaf = len(text.ends) - 1, text.ends.pop(0)
            begin = len(tokens) - length
            leaf.show(tokens, len(tokens) - leaf.length, begin + self._depth)

    def _join(self, node: Node) -> None:
        """Make one run of a node and its only child if they occur equally often."""
        if node.parent is None or len(node.children) != 1:
            return
        (child,) = node.children.values()
        if child.count == node.count:
            child.begin -= node.length
            _replace(node, child)
            self.num_nodes -= 1


def _replace(old: Node, new: Node) -> None:
    """Put a node in the place of another, which shows the same first token."""
    parent = new.parent = old.parent
    assert parent is not None
    parent.children[old.text[old.begin]] = new  # type: ignore[index]
    if parent.parent is not None:
        parent.ranked[parent.ranked.index(old)] = new


def _falling(node: Node) -> int:
    return -node.count


def _rise(node: Node, child: Node) -> None:
    if node.parent is not None:
        ranked = node.ranked
        place = ranked.index(child)
        if place and ranked[place - 1].count <= child.count + 1:
            first = bisect_left(ranked, -ranked[place - 1].count, key=_falling)
            ranked.insert(first, ranked.pop(place))
    child.count += 1


def _fall(node: Node, child: Node) -> None:
    """Count the child once less, and rank it anew: before all others of its new count."""
    if node.parent is not None:
        ranked = node.ranked
        place = ranked.index(child)
        last = bisect_right(ranked, -child.count, key=_falling) - 1
        ranked.insert(last, ranked.pop(place))
    child.count -= 1
