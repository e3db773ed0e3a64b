"""Pieces of an answer: cut before a stop string, wherever steps end.

Run: pytest tests/model/serve/test_decoding.py
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")

from model.api.texts import Text
from model.engine.sequence import Request
from model.engine.step import StepRecord
from model.engine.tree import DraftTree
from model.serve.decoding import DecodingThread, Job
from tests.model.api.test_decoder import decoder_for, demo

# A token is a letter: its place in the alphabet.
LETTERS = SimpleNamespace(
    all_special_ids=(), convert_ids_to_tokens=chr, decode=lambda ids, **_: "".join(map(chr, ids))
)


def job_with(stop: list[str]) -> Job:
    return Job(Text(Request([1], 99), LETTERS, stop), lambda item: None)


def shown(text: str, stop: list[str], sizes: list[int]) -> tuple[list[str], int, str | None]:
    """Return the pieces of a text that comes in steps of these sizes, its counted tokens and its end."""
    job, pieces, place = job_with(stop), list[str](), 0
    for size in sizes:
        tokens = [ord(letter) for letter in text[place : place + size]]
        place += size
        ended = "length" if place >= len(text) else None
        record = StepRecord(tokens, DraftTree.chain(tokens), [0], ended)
        piece = job.piece(record)
        pieces.append(piece.text)
        if piece.finish_reason:
            return pieces, job.num_new, piece.finish_reason
    raise AssertionError("the text has an end")


def test_a_text_is_cut_before_its_first_stop_string_wherever_steps_end() -> None:
    chosen = random.Random(0)
    num_stopped = 0
    for _ in range(300):
        text = "".join(chosen.choices("ab", k=chosen.randint(1, 20)))
        stop = ["".join(chosen.choices("ab", k=chosen.randint(1, 5))) for _ in range(2)]
        sizes = chosen.choices((1, 2, 5), k=20)
        # the first place at which one is complete, and the first of those that are complete there
        ends = [n for n in range(len(text) + 1) if any(one in text[:n] for one in stop)]
        pieces, count, reason = shown(text, stop, sizes)
        if not ends:
            assert ("".join(pieces), count, reason) == (text, len(text), "length")
            continue
        num_stopped += 1
        head = text[: ends[0]]
        kept = head[: min(head.index(one) for one in stop if one in head)]
        assert ("".join(pieces), count, reason) == (kept, ends[0], "stop")
    assert 50 < num_stopped < 290


def test_letters_wait_only_while_a_stop_string_may_have_begun() -> None:
    pieces, _, _ = shown("xxabxxxab", ["abc"], [4, 1, 4])
    assert pieces == ["xx", "abx", "xxab"]


def test_a_request_that_takes_too_long_ends_alone() -> None:
    thread = DecodingThread(decoder_for("vanilla", *demo()), "demo", batch_size=2, max_queue=2)
    found: dict[str, list[Any]] = {"late": [], "good": []}
    for name, deadline in (("late", 0.0), ("good", float("inf"))):
        request = Request([5, 6, 7], 2)
        thread.submit([Job(Text(request, demo()[1]), found[name].append, deadline)])
    thread.start()
    while not (found["good"] and found["good"][-1].finish_reason):
        pass
    thread.close()
    thread.join()
    assert [type(item) for item in found["late"]] == [TimeoutError]
    with pytest.raises(RuntimeError, match="has ended"):
        thread.submit([job_with([])])
