"""A draft under construction: paths of tokens that share their beginnings."""

from __future__ import annotations


class PathTree:
    """Paths from one root, merged: no node has two children with the same token."""

    def __init__(self, root: int) -> None:
        self.tokens = [root]  # of the nodes in the order in which they were added
        self._children: list[dict[int, int]] = [{}]

    def find(self, node: int, token: int) -> int | None:
        """Return the child of a node with this token, None if there is none."""
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
