"""A trace: what a model says after its own texts and after the guesses that methods asked about.

`evaluation.record` writes it, `evaluation.replay` reads it, and docs/bank.md says how anybody can: it needs numpy
alone. Texts are a trie: a node is a text, its children are the texts with one more token, and each node has a row,
the likeliest next tokens with their logits in sixteenths, and logit samples in whole numbers
(`model.engine.read_out`), as much of both as some method asked for. Prompts, answers and rejected guesses are all
paths in it, so that what they share is stored once.

Files: DIR/trace.json is the `Source`. DIR/BENCH.trace has a block for each question in the order in which they were
asked: eight bytes with the length of what follows, packed with xz. That is a line of JSON, then arrays by the
names, shapes and types that it gives.

Shapes: M texts, K likeliest tokens of a row, W of a row after an answer's tokens, S logit samples.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from model.commands.command_line import UserError, first_line
from model.commands.files import parse_json, read_text, write_whole

FORMAT = "trace-1"
SOURCE, SUFFIX = "trace.json", ".trace"
EMPTY = 0  # the node of the empty text
NUM_KEPT = 10  # likeliest tokens K, but after an answer's tokens
LOGIT_STEPS = 16  # steps of a logit of 1
LARGEST, LARGEST_SAMPLE = 2000, 127  # larger logits and samples are cut
FIRST_CAPACITY = 1024
ARRAYS = ("_token_ids", "_logits", "_samples", "_widths", "_is_sampled")  # with a row for each text
LENGTH_BYTES, MOST_BYTES = 8, 2**30
RECORD_AGAIN = "run the command that recorded it again"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a trace comes from: model, questions, machine, limits, and the methods that it serves exactly."""

    name: str  # of its folder, in tables
    model_path: str
    model_fingerprint: str
    vocabulary: str  # a hash of the tokenizer's tokens
    dtype: str
    machine: str
    git_commit: str | None
    vocab_size: int  # tokens V that the model's output tells apart
    context: int | None  # most tokens of prompt and answer
    chain_only: bool  # whether the model verifies chains only
    head_share: float  # of the output head in the weights
    eos_ids: list[int]
    conv_template: str
    max_new_tokens: int
    num_likeliest: int  # W
    methods: list[str]
    sets: dict[str, dict[str, Any]]  # by benchmark: its file's hash, and which of its questions
    format: str = FORMAT

    @classmethod
    def read(cls, folder: Path) -> Source:
        """Read a trace's; a `UserError` if there is none."""
        file = folder / SOURCE
        values = parse_json(read_text(file, "trace", MOST_BYTES), f"trace {file}")
        try:
            source = cls(**values)
        except TypeError as error:
            raise UserError(
                f"trace {file}: is not one: {first_line(error)}; {RECORD_AGAIN}"
            ) from error
        if source.format != FORMAT:
            raise UserError(f"trace {file}: is of format {source.format}; allowed: {FORMAT}")
        return source

    def write(self, folder: Path) -> None:
        write_whole(folder / SOURCE, json.dumps(asdict(self), indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One prompt and its greedy answer."""

    prompt_ids: list[int]
    answer_ids: list[int]
    text: str


class Row(NamedTuple):
    """What the model says after a text: its likeliest tokens, their logits in sixteenths, and logit samples [S].

    There are as many tokens as were asked for; samples are left out where nobody asked for them.
    """

    token_ids: np.ndarray
    logits: np.ndarray
    samples: np.ndarray | None


def whole(numbers: np.ndarray, steps: int, most: int) -> np.ndarray:
    """Return numbers, cut at `most`, in whole steps of which `steps` make 1; what is not a number is 0."""
    cut = np.clip(np.nan_to_num(numbers, nan=0.0, posinf=most, neginf=-most), -most, most)
    return np.rint(cut * steps)


class RecordedQuestion:
    """A growing trie of rows, and the turns of its question."""

    def __init__(self, question_id: int | str, category: str, num_samples: int) -> None:
        self.question_id, self.category = question_id, category
        self.turns: list[RecordedTurn] = []
        self._tokens, self._parents = [-1], [-1]
        self._children: dict[tuple[int, int], int] = {}
        # Up to the room for further texts; what was not asked for is 0.
        self._token_ids = np.zeros((FIRST_CAPACITY, NUM_KEPT), np.int32)
        self._logits = np.zeros((FIRST_CAPACITY, NUM_KEPT), np.int16)
        self._samples = np.zeros((FIRST_CAPACITY, num_samples), np.int8)
        self._widths, self._is_sampled = (np.zeros(FIRST_CAPACITY, np.int8) for _ in range(2))
        # Of rows that are wider, what follows the first K tokens: tokens and logits.
        self._further: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def num_texts(self) -> int:
        """Texts M with a row."""
        return len(self._tokens) - 1

    def child(self, node: int, token: int) -> int:
        """Return the text with one more token; -1 if it was never asked about."""
        return self._children.get((node, token), -1)

    def token(self, node: int) -> int:
        return self._tokens[node]

    def lacks(self, node: int, count: int, with_samples: bool) -> bool:
        """Whether a text's row has fewer tokens, or no samples."""
        is_narrow = self._widths[node] < min(count, NUM_KEPT)
        return bool(is_narrow or (with_samples and not self._is_sampled[node]))

    def path_to(self, node: int) -> list[int]:
        """Return the tokens of a text."""
        tokens = []
        while node != EMPTY:
            tokens.append(self._tokens[node])
            node = self._parents[node]
        return tokens[::-1]

    @cached_property
    def after(self) -> dict[int, int]:
        """Of every token the last text that ends with it, whose row is like that of another such text."""
        return {token: node for node, token in enumerate(self._tokens) if node != EMPTY}

    def rows(self, nodes: Sequence[int], count: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return the `count` likeliest tokens after texts and their logits, or as many as are kept.

        Further ones up to K are token 0 with the lowest logit.
        """
        token_ids = self._token_ids[nodes, :count].tolist()
        is_kept = np.arange(min(count, NUM_KEPT)) < self._widths[nodes, None]
        kept = np.where(is_kept, self._logits[nodes, :count], -LARGEST * LOGIT_STEPS)
        logits = (kept / LOGIT_STEPS).tolist()
        if count > NUM_KEPT:
            for place, node in enumerate(nodes):
                if node in self._further:
                    more_ids, more = self._further[node]
                    token_ids[place] += more_ids[: count - NUM_KEPT].tolist()
                    logits[place] += (more[: count - NUM_KEPT] / LOGIT_STEPS).tolist()
        return token_ids, logits

    def width(self, node: int) -> int:
        """Return how many tokens of a text's row are recorded."""
        further, _ = self._further.get(node, ((), ()))
        return int(self._widths[node]) + len(further)

    def samples(self, nodes: Sequence[int]) -> np.ndarray:
        """Return the logit samples after texts, float32 [N, S]; zeros where they were not asked for."""
        return self._samples[nodes].astype(np.float32)

    def add(self, node: int, token: int, row: Row) -> int:
        """Return the text with one more token; its row gets what it has not: a method saw the rest."""
        place = self.child(node, token)
        if place < 0:
            place = len(self._tokens)
            self._children[node, token] = place
            self._tokens.append(token)
            self._parents.append(node)
            if place == len(self._token_ids):
                for name in ARRAYS:
                    array = getattr(self, name)
                    setattr(self, name, np.concatenate((array, np.zeros_like(array))))
        width, known = min(len(row.token_ids), NUM_KEPT), self._widths[place]
        if width > known:
            self._widths[place] = width
            self._token_ids[place, known:width] = row.token_ids[known:width]
            self._logits[place, known:width] = row.logits[known:width]
        if len(row.token_ids) > NUM_KEPT and place not in self._further:
            self._further[place] = (row.token_ids[NUM_KEPT:], row.logits[NUM_KEPT:])
        if row.samples is not None and not self._is_sampled[place]:
            self._is_sampled[place], self._samples[place] = True, row.samples
        return place

    def pack(self) -> bytes:
        """Return the block of the question without its length."""
        size = len(self._tokens)
        tokens = np.array(self._tokens)
        order = np.argsort(tokens, kind="stable")  # rows after equal tokens are alike
        widths, is_sampled = self._widths[order], self._is_sampled[order]
        kept = np.arange(NUM_KEPT) < widths[:, None]  # [M, K]
        # Each beside the one before it in its row is small.
        logits = np.diff(self._logits[:size][order], axis=1, prepend=np.int16(0))
        further = [self._further[node] for node in sorted(self._further)]
        arrays = {
            "steps_back": (np.arange(size) - np.array(self._parents)).astype(np.int32),
            "tokens": tokens.astype(np.int32),
            "widths": widths,
            "token_ids": self._token_ids[:size][order][kept],
            "logits": logits.T[kept.T],
            "is_sampled": is_sampled,
            "samples": self._samples[order][is_sampled > 0].T,
            "further": np.array(sorted(self._further), np.int32),
            "further_ids": np.array([ids for ids, _ in further], np.int32),
            "further_logits": np.array([values for _, values in further], np.int16),
        }
        header = {
            "question_id": self.question_id,
            "category": self.category,
            "turns": [asdict(turn) for turn in self.turns],
            "arrays": {name: [array.shape, str(array.dtype)] for name, array in arrays.items()},
        }
        content = (np.ascontiguousarray(array).tobytes() for array in arrays.values())
        return lzma.compress(b"".join((json.dumps(header).encode(), b"\n", *content)))

    @classmethod
    def unpack(cls, block: bytes) -> RecordedQuestion:
        """Return the question of a block; a `ValueError` or `LZMAError` if it is none."""
        line, _, content = lzma.decompress(block).partition(b"\n")
        header = json.loads(line)
        arrays: dict[str, np.ndarray] = {}
        begin = 0
        for name, (shape, kind) in header["arrays"].items():
            end = begin + int(np.prod(shape)) * np.dtype(kind).itemsize
            arrays[name] = np.frombuffer(content[begin:end], kind).reshape(shape)
            begin = end
        size = len(arrays["tokens"])
        order = np.argsort(arrays["tokens"], kind="stable")
        found = cls(header["question_id"], header["category"], len(arrays["samples"]))
        found.turns = [RecordedTurn(**turn) for turn in header["turns"]]
        for name in ARRAYS:
            array = getattr(found, name)
            setattr(found, name, np.zeros((size, *array.shape[1:]), array.dtype))
        kept = np.arange(NUM_KEPT) < arrays["widths"][:, None]
        token_ids, logits = (np.zeros((size, NUM_KEPT), kind) for kind in (np.int32, np.int16))
        token_ids[kept] = arrays["token_ids"]
        logits.T[kept.T] = arrays["logits"]
        found._token_ids[order] = token_ids
        found._logits[order] = np.cumsum(logits, axis=1, dtype=np.int16) * kept
        found._widths[order], found._is_sampled[order] = arrays["widths"], arrays["is_sampled"]
        found._samples[order[arrays["is_sampled"] > 0]] = arrays["samples"].T
        found._tokens = arrays["tokens"].tolist()
        found._parents = (np.arange(size) - arrays["steps_back"]).tolist()
        pairs = zip(found._parents, found._tokens, strict=True)
        found._children = {pair: node for node, pair in enumerate(pairs) if node != EMPTY}
        further = zip(arrays["further_ids"], arrays["further_logits"], strict=True)
        found._further = dict(zip(arrays["further"].tolist(), further, strict=True))
        return found


def append(file: Path, question: RecordedQuestion) -> None:
    """Append a question's block to a file; a `UserError` if it cannot be written."""
    block = question.pack()
    try:
        with file.open("ab") as content:
            content.write(len(block).to_bytes(LENGTH_BYTES, "little") + block)
    except OSError as error:
        raise UserError(f"trace {file}: cannot be written: {error.strerror}") from error


def questions_of(file: Path, is_open: bool = False) -> Iterator[RecordedQuestion]:
    """Yield a file's questions.

    Where the file `is_open`, a last block that was only partly written is cut off; else, and for a block that is
    none, that is a `UserError`.
    """
    if is_open and not file.exists():
        return
    try:
        with file.open("r+b" if is_open else "rb") as content:
            while length := content.read(LENGTH_BYTES):
                count = int.from_bytes(length, "little")
                block = content.read(min(count, MOST_BYTES))
                if is_open and len(block) < count:
                    content.truncate(content.tell() - len(block) - len(length))
                    return
                yield RecordedQuestion.unpack(block)
    except OSError as error:
        raise UserError(f"trace {file}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, lzma.LZMAError) as error:
        raise UserError(
            f"trace {file}: a question cannot be read: {first_line(error)}; {RECORD_AGAIN}"
        ) from error
