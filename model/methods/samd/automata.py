"""Suffix automata: of a text that grows token by token, and of a corpus, built once and saved as arrays.

A state stands for a set of suffixes that occur at the same places; following links from the last
state walks the suffixes of the text from the longest to the empty one. Appending a token takes
amortised constant time, and n tokens make fewer than 2n states and 3n transitions.

The link of the last state is the longest suffix that occurs earlier: no separate search is needed.

Source: A. Blumer et al., The smallest automaton recognizing the subwords of a text, Theoretical
Computer Science 40, 1985.

Documents of a corpus are separated by a token that no text holds, so that no match and no draft crosses from one to
the next.

Shapes: n corpus tokens (boundaries included), S states, E transitions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ...machine.files import atomic_write, refuse_lfs_pointer, written_state

ROOT = 0  # the state of the empty suffix
BOUNDARY = -1
NAMES = ("tokens", "links", "lengths", "ends", "first_edges", "edge_tokens", "edge_states")
FORMAT = "suffix-automaton-1"


class Match(NamedTuple):
    length: int  # tokens of the longest suffix that occurs earlier; 0 if there is none
    continuation: Sequence[int]  # the tokens that followed it there
    source: str = "text"  # or "corpus"


class SuffixAutomaton:
    """The suffix automaton of a growing text.

    With `prefers_latest` a match continues from the place where it was last the longest match, not from its
    first occurrence. Tracking the true last occurrence would not be constant time; this is, and comes close.
    """

    def __init__(self, tokens: Sequence[int] = (), prefers_latest: bool = False) -> None:
        self.text: list[int] = []
        # Of each state: the state after one more token; the state of its longest suffix that occurs at
        # more places, -1 for the root; the length of its longest string; where one of its occurrences
        # ends, so that `text[end]` follows it.
        self.transitions: list[dict[int, int]] = [{}]
        self.links, self.lengths, self.ends = [-1], [0], [0]
        self._last = ROOT
        self._prefers_latest = prefers_latest
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._append(token)

    def match(self, max_tokens: int) -> Match:
        """Return the longest suffix that occurs earlier, with up to `max_tokens` that followed it."""
        if self._last == ROOT:
            return Match(0, [])
        state = self.links[self._last]
        end = self.ends[state]
        length = self.lengths[state]
        return Match(length, self.text[end : end + max_tokens] if length else [])

    def _append(self, token: int) -> None:
        transitions, links, lengths = self.transitions, self.links, self.lengths
        state = self._last
        if self._prefers_latest and state != ROOT:
            self.ends[links[state]] = len(self.text)
        self.text.append(token)
        new = self._last = self._add_state({}, len(self.text), len(self.text))
        while state >= 0 and token not in transitions[state]:
            transitions[state][token] = new
            state = links[state]
        if state < 0:
            links[new] = ROOT
            return
        after = transitions[state][token]
        if lengths[after] == lengths[state] + 1:
            links[new] = after
            return
        # The shorter strings of `after` now occur at one more place than its longer ones.
        split = self._add_state(dict(transitions[after]), lengths[state] + 1, self.ends[after])
        links[split] = links[after]
        links[after] = links[new] = split
        while state >= 0 and transitions[state].get(token) == after:
            transitions[state][token] = split
            state = links[state]

    def _add_state(self, transitions: dict[int, int], length: int, end: int) -> int:
        self.transitions.append(transitions)
        self.links.append(ROOT)
        self.lengths.append(length)
        self.ends.append(end)
        return len(self.links) - 1


class StaticAutomaton:
    """A read-only suffix automaton, shared by all followers.

    Args:
        arrays: int32 arrays by name: `tokens` [n], `links`, `lengths` and `ends` [S], and the
            transitions, sorted by state and token: those of state s are `edge_tokens` and
            `edge_states` [E] from `first_edges[s]` to `first_edges[s + 1]` [S + 1].

    Raises:
        ValueError: if arrays are missing or do not fit together.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        _check(arrays)
        self.arrays = dict(arrays)
        self.tokens, self.links, self.lengths, self.ends = (arrays[name] for name in NAMES[:4])
        self._first_edges, self._edge_tokens, self._edge_states = (
            arrays[name] for name in NAMES[4:]
        )

    @classmethod
    def from_automaton(cls, automaton: SuffixAutomaton) -> StaticAutomaton:
        edges = [sorted(transitions.items()) for transitions in automaton.transitions]
        lists = {
            "tokens": automaton.text,
            "links": automaton.links,
            "lengths": automaton.lengths,
            "ends": automaton.ends,
            "first_edges": np.cumsum([0, *map(len, edges)]),
            "edge_tokens": [token for pairs in edges for token, _ in pairs],
            "edge_states": [state for pairs in edges for _, state in pairs],
        }
        return cls({name: np.array(values, dtype=np.int32) for name, values in lists.items()})

    @property
    def largest_token(self) -> int:
        """The largest token id in the corpus; -1 if it has none."""
        return int(self.tokens.max(initial=BOUNDARY))

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def step(self, state: int, token: int) -> int:
        """Return the state after one more token, -1 if the corpus has no such string."""
        begin, end = self._first_edges[state], self._first_edges[state + 1]
        edge = begin + int(self._edge_tokens[begin:end].searchsorted(token))
        found = edge < end and self._edge_tokens[edge] == token
        return int(self._edge_states[edge]) if found else -1

    def save(self, file: Path) -> None:
        """Save as safetensors; a reader sees the whole file or none."""
        with atomic_write(file) as temporary:
            save_file(self.arrays, temporary, metadata={"format": FORMAT})

    @staticmethod
    def load(file: str) -> StaticAutomaton:
        """Load a saved automaton, or raise ValueError; the last one stays in memory while its file is unchanged."""
        return _loaded(file, written_state(file))


@lru_cache(maxsize=1)
def _loaded(file: str, state: tuple[object, ...]) -> StaticAutomaton:
    refuse_lfs_pointer(file, f"automaton {file}")
    try:
        with safe_open(file, framework="numpy") as content:
            is_ours = (content.metadata() or {}).get("format") == FORMAT
            names = content.keys()
            arrays = {name: content.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"automaton {file}: cannot be read: {error}") from error
    if not is_ours:
        raise ValueError(
            f"automaton {file}: is not a saved automaton; make one with scripts.build_automaton"
        )
    try:
        return StaticAutomaton(arrays)
    except ValueError as error:
        raise ValueError(f"automaton {file}: {error}") from error


class Follower:
    """Follows a text through a static automaton."""

    def __init__(self, automaton: StaticAutomaton) -> None:
        self._automaton = automaton
        self._state = ROOT
        self.length = 0  # of the longest suffix of the text that occurs in the corpus

    def extend(self, tokens: Sequence[int]) -> None:
        """Follow these tokens, in amortised constant time each."""
        automaton = self._automaton
        for token in tokens:
            state = automaton.step(self._state, token)
            while state < 0 and self._state != ROOT:
                self._state = int(automaton.links[self._state])
                self.length = int(automaton.lengths[self._state])
                state = automaton.step(self._state, token)
            if state >= 0:
                self._state = state
                self.length += 1

    def match(self, max_tokens: int) -> Match:
        """Return the first occurrence of the text's end in the corpus, with what followed in that document."""
        if not self.length:
            return Match(0, [])
        end = int(self._automaton.ends[self._state])
        following = self._automaton.tokens[end : end + max_tokens].tolist()
        if BOUNDARY in following:
            following = following[: following.index(BOUNDARY)]
        return Match(self.length, following, "corpus")


def _check(arrays: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError unless the arrays form an automaton that is safe to follow."""
    if set(arrays) != set(NAMES):
        raise ValueError(f"got arrays {sorted(arrays)}; allowed: {', '.join(NAMES)}")
    if any(array.dtype != np.int32 or array.ndim != 1 for array in arrays.values()):
        raise ValueError("got arrays that are not one-dimensional int32")
    tokens, links, lengths, ends, first, edge_tokens, edge_states = (arrays[name] for name in NAMES)
    num_states = len(links)
    fits = (
        num_states > 0
        and len(lengths) == len(ends) == num_states == len(first) - 1
        and len(edge_tokens) == len(edge_states)
        and first[0] == 0
        and first[-1] == len(edge_tokens)
        and bool((np.diff(first) >= 0).all())
        and _within(edge_states, 0, num_states)
        and _within(ends, 0, len(tokens) + 1)
        and links[0] == -1
        and lengths[0] == 0
        and _within(links[1:], 0, num_states)
        # Links lead to shorter strings, so following them ends.
        and bool((lengths[links[1:]] < lengths[1:]).all())
        and _within(tokens, BOUNDARY, np.iinfo(np.int32).max)
    )
    if not fits:
        raise ValueError("its arrays do not fit together; build it again")


def _within(values: np.ndarray, lowest: int, end: int) -> bool:
    return not len(values) or (lowest <= int(values.min()) and int(values.max()) < end)
