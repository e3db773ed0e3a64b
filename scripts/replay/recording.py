"""One file with the rows of a model after every text that a drafter has asked about.

The texts are a trie: a node is a text, its children are the texts with one more token, and each node
has a row, the K likeliest next tokens, their logits, and logit samples (`model.engine.read_out`). Prompts, answers
and rejected guesses are all paths in it, and what they share is stored once. With the greedy answers of
every prompt that is all a train-free drafter can learn from a model, so that drafters can be scored
without it.

Shapes: M texts (the empty one included), K likeliest tokens kept, S logit samples.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from model.commands.command_line import UserError, first_line
from model.commands.files import replace_file
from model.engine.read_out import sampled_ids

FORMAT = "replay-recording-3"
EMPTY = 0  # the node of the empty text
FIRST_CAPACITY = 1024


@dataclass(frozen=True, slots=True)
class Source:
    """Origin of a recording: the model, its questions and the limits."""

    model_path: str
    model_fingerprint: str
    dtype: str
    git_commit: str | None
    vocab_size: int  # tokens V that the model's output tells apart
    top_k: int  # likeliest tokens K kept of every row
    chain_only: bool  # whether the model verifies chains only
    max_new_tokens: int
    eos_ids: tuple[int, ...]  # token ids that end a text
    questions: str  # name of the question file


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One prompt and its greedy answer."""

    question_id: int | str  # turns of one question follow each other
    category: str
    context: int | None  # most tokens (prompt and answer) that the model allows; None: no limit
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


class Recording:
    """A growing trie of rows, and the turns it began with."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.turns: list[RecordedTurn] = []
        self._children: dict[tuple[int, int], int] = {}
        self._parents = [-1]
        self._tokens = [-1]
        num_logit_samples = len(sampled_ids(source.vocab_size))
        # As they are named in the file, and in the order of `rows`.
        self._rows = {
            "ids": np.zeros((FIRST_CAPACITY, source.top_k), dtype=np.int32),  # [M, K]
            "logits": np.zeros((FIRST_CAPACITY, source.top_k), dtype=np.float32),  # [M, K]
            "probes": np.zeros((FIRST_CAPACITY, num_logit_samples), dtype=np.float32),  # [M, S]
        }

    @property
    def num_texts(self) -> int:
        """Texts M with a row."""
        return len(self._tokens) - 1

    def child(self, node: int, token: int) -> int:
        """Return the text with one more token; -1 if it was never asked about."""
        return self._children.get((node, token), -1)

    def token(self, node: int) -> int:
        return self._tokens[node]

    def rows(self, nodes: list[int]) -> tuple[np.ndarray, ...]:
        """Return the likeliest tokens after these texts and their logits, each [N, K], and logit samples [N, S]."""
        return tuple(values[nodes] for values in self._rows.values())

    def add(self, node: int, token: int, *row: np.ndarray) -> int:
        """Return the text with one more token; if it is new, with its row, in the order of `rows`."""
        known = self.child(node, token)
        if known >= 0:
            return known
        new = len(self._tokens)
        for (name, values), value in zip(list(self._rows.items()), row, strict=True):
            if new == len(values):
                self._rows[name] = np.concatenate((values, np.zeros_like(values)))
            self._rows[name][new] = value
        self._children[node, token] = new
        self._parents.append(node)
        self._tokens.append(token)
        return new

    def save(self, file: Path) -> None:
        """Write the file; a reader sees the old content or all of the new one.

        Raises:
            UserError: if it cannot be written.
        """
        size = len(self._tokens)
        metadata = {
            "format": FORMAT,
            "source": json.dumps(asdict(self.source)),
            "turns": json.dumps([asdict(turn) for turn in self.turns]),
        }
        arrays = {
            "parents": np.array(self._parents, dtype=np.int32),
            "tokens": np.array(self._tokens, dtype=np.int32),
            **{name: values[:size] for name, values in self._rows.items()},
        }
        replace_file(file, lambda temporary: save_file(arrays, temporary, metadata=metadata))

    @classmethod
    def load(cls, file: Path) -> Recording:
        """Read a file.

        Raises:
            UserError: if it is not there or is not a recording.
        """
        try:
            with safe_open(file, framework="numpy") as content:
                metadata = content.metadata() or {}
                names = content.keys()
                arrays = {name: content.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise UserError(f"recording {file}: cannot be read: {first_line(error)}") from error
        if metadata.get("format") != FORMAT:
            raise UserError(
                f"recording {file}: is not a recording; make one with scripts.replay record"
            )
        given: dict[str, Any] = json.loads(metadata["source"])
        recording = cls(Source(**{**given, "eos_ids": tuple(given["eos_ids"])}))
        for turn in json.loads(metadata["turns"]):
            texts = {name: tuple(turn[name]) for name in ("prompt_ids", "answer_ids")}
            recording.turns.append(RecordedTurn(**turn | texts))
        recording._parents = arrays["parents"].tolist()
        recording._tokens = arrays["tokens"].tolist()
        recording._rows = {name: arrays[name] for name in recording._rows}
        pairs = zip(recording._parents, recording._tokens, strict=True)
        recording._children = {pair: node for node, pair in enumerate(pairs) if node != EMPTY}
        return recording
