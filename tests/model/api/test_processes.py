"""Processes, event loops, interrupts, and streams that are left: the table of docs/library.md, line by line.

Run: pytest tests/model/api/test_processes.py
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

from model import SpeculativeDecoder, accelerate
from model.machine.locks import SharedLock
from tests.model.decoded import known

PROMPT, OTHER = [5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9]
NUM_TOKENS = 6
HANGS = 200  # seconds; only a child that waits for ever takes that long
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(known("Llama, grouped heads").build(), None, "recycling")


@pytest.fixture(autouse=True)
def _cold(decoder: SpeculativeDecoder) -> None:
    """Forget what other tests taught: a stream of two steps is open no longer."""
    decoder.reset()


@pytest.fixture(scope="module")
def expected(decoder: SpeculativeDecoder) -> Callable[[list[int]], list[int]]:
    model = copy.deepcopy(decoder.target.model)

    def text(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        words = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **words)
        return found[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    return text


def answer(decoder: SpeculativeDecoder, prompt: list[int] = PROMPT, **words: Any) -> list[int]:
    return decoder.generate(prompt, max_new_tokens=NUM_TOKENS, **words).token_ids


def streamed(decoder: SpeculativeDecoder) -> Iterator[Any]:
    return decoder.stream(PROMPT, max_new_tokens=NUM_TOKENS)


def tokens_of(pieces: Any) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def in_child(work: Callable[[], object]) -> str:
    """Fork; return what the child says."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        signal.alarm(HANGS)
        try:
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as said_by_child:
        text = said_by_child.read().decode()
    os.waitpid(child, 0)
    return text


class Held:
    """Code of a user's that runs in a thread of a text, and waits there."""

    def __init__(self) -> None:
        self.is_there, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            self.is_there.set()
            self.may_go_on.wait()
        return arguments[-1] if len(arguments) == 2 else None  # the scores, if it is a processor


@forks
@pytest.mark.parametrize("begun", ["nothing", "text", "stream"])
def test_the_child_of_a_fork_decodes(decoder: Any, expected: Any, begun: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert (
            torch.ones(3_000_000).sum() == 3_000_000
        )  # the pool has threads, which the child lacks
        if begun == "text":
            answer(decoder)
        if begun == "stream":
            left = streamed(decoder)
            next(left)
        said = in_child(lambda: (float(torch.ones(3_000_000).sum()), answer(decoder)))
        assert said == str((3_000_000.0, expected(PROMPT)))
    finally:
        torch.set_num_threads(before)
    assert answer(decoder, OTHER) == expected(OTHER)


@forks
def test_the_child_decodes_that_was_forked_beside_user_code(decoder: Any, expected: Any) -> None:
    held = Held()
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(answer, decoder, logits_processors=[held])
        held.is_there.wait()
        said = in_child(lambda: answer(decoder, OTHER))
        held.may_go_on.set()
        assert text.result() == expected(PROMPT)
    assert said == str(expected(OTHER))


@forks
def test_the_child_of_a_fork_within_a_text_goes_on_with_it(decoder: Any, expected: Any) -> None:
    said: list[str] = []

    def forking(_: Any, scores: torch.Tensor) -> torch.Tensor:
        if not said:
            said.append("")
            said[0] = in_child(lambda: tokens_of(pieces))
        return scores

    pieces = decoder.stream(PROMPT, max_new_tokens=NUM_TOKENS)
    begun = tokens_of([next(pieces)])
    said[:] = [in_child(lambda: tokens_of(pieces))]
    rest = tokens_of(pieces)
    assert said == [str(rest)] and begun + rest == expected(PROMPT)
    said.clear()
    assert answer(decoder, logits_processors=[forking]) == expected(PROMPT)
    assert said[0].startswith("StopIteration") or said[0] == "[]"


@forks
def test_the_child_that_was_forked_beside_a_pass_says_so(expected: Any, decoder: Any) -> None:
    model, held = copy.deepcopy(decoder.target.model), Held()
    model.model.layers[0].register_forward_hook(lambda *_: held())
    own = SpeculativeDecoder(model, None, "recycling")
    other = own.session()
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(answer, own)
        held.is_there.wait()
        calls: list[Callable[[], object]] = [
            lambda: answer(own),
            lambda: answer(other),
            lambda: SpeculativeDecoder(model, None, "recycling"),
            own.session,
            own.reset,
        ]
        for call in calls:
            said = in_child(call)
            assert said.startswith("RuntimeError: decoder: its process was forked while another")
            assert "allowed: " in said
        ids = torch.tensor([PROMPT])
        plain = in_child(lambda: model(ids).logits.argmax(-1)[0, -1].tolist())
        assert plain == str(expected(PROMPT)[0])
        held.may_go_on.set()
        assert text.result() == expected(PROMPT)
    assert answer(own) == expected(PROMPT)


@forks
def test_a_lock_that_the_forking_thread_holds_stays_its_own() -> None:
    lock = SharedLock()

    def take() -> str:
        with lock:
            return f"taken, {lock.is_mine}"

    with lock:
        assert in_child(take) == "taken, True"
    assert in_child(take) == "taken, True" and not lock.is_mine


@forks
def test_a_pool_of_forked_processes_decodes(decoder: Any, expected: Any) -> None:
    global _OF_POOL
    _OF_POOL = decoder
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(_in_pool, [PROMPT, OTHER]) == [expected(PROMPT), expected(OTHER)]


_OF_POOL: Any = None


def _in_pool(prompt: list[int]) -> list[int]:
    return answer(_OF_POOL, prompt)


def test_a_decoder_is_not_sent_to_a_spawned_process(decoder: Any, expected: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot be pickled.*load_memory"):
        ForkingPickler.dumps(decoder)
    model = accelerate(copy.deepcopy(decoder.target.model), method="recycling")
    ids = torch.tensor([PROMPT])
    words = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
    there = pickle.loads(pickle.dumps(model))
    found = there.generate(ids, attention_mask=torch.ones_like(ids), **words)
    assert found[0, len(PROMPT) :].tolist() == expected(PROMPT)
    assert there.generate.accept_lengths and not model.generate.accept_lengths


def test_an_event_loop_decodes_in_threads_and_in_its_own(decoder: Any, expected: Any) -> None:
    async def streaming() -> list[int]:
        pieces, tokens = streamed(decoder), []
        while piece := await asyncio.to_thread(next, pieces, None):
            tokens += piece.token_ids
        return tokens

    async def both() -> list[list[int]]:
        return await asyncio.gather(
            asyncio.to_thread(answer, decoder, OTHER), streaming(), streaming()
        )

    assert asyncio.run(both()) == [expected(OTHER), expected(PROMPT), expected(PROMPT)]

    async def direct() -> None:
        pieces = streamed(decoder)
        next(pieces)
        await asyncio.sleep(0)
        task = asyncio.create_task(again())
        assert await task == expected(OTHER)  # in the same thread: nothing to wait for
        with pytest.raises(RuntimeError, match="after another was begun"):
            next(pieces)

    async def again() -> list[int]:
        return answer(decoder, OTHER)

    asyncio.run(direct())


def test_a_thread_does_not_wait_for_its_own_stream(decoder: Any, expected: Any) -> None:
    def work() -> None:
        pieces = streamed(decoder)
        next(pieces)
        assert answer(decoder, OTHER) == expected(OTHER)
        with pytest.raises(RuntimeError, match="after another was begun"):
            next(pieces)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
    assert answer(decoder) == expected(PROMPT)


@pytest.mark.parametrize("way", ["context", "moved"])
def test_a_thread_of_a_pool_waits_for_a_stream_that_others_continue(
    decoder: Any, expected: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model.api.permits.PATIENCE", HANGS)
    is_waiting = threading.Event()
    wait = decoder.queue.permits.changed.wait
    monkeypatch.setattr(
        decoder.queue.permits.changed, "wait", lambda *_: (is_waiting.set(), wait(0.01))[1]
    )
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        pieces = streamed(decoder)
        tokens = []
        if way == "moved":  # a stream that two threads have continued is a third one's, too
            tokens += second.submit(next, pieces).result().token_ids
            tokens += first.submit(next, pieces).result().token_ids
            waiting = first.submit(answer, decoder, OTHER)
        else:  # as web frameworks call in threads
            tokens += first.submit(contextvars.copy_context().run, next, pieces).result().token_ids
            waiting = first.submit(contextvars.copy_context().run, answer, decoder, OTHER)
        assert is_waiting.wait(HANGS)
        tokens += second.submit(tokens_of, pieces).result()
        assert tokens == expected(PROMPT)
        assert waiting.result() == expected(OTHER)


@pytest.mark.parametrize("what", ["text", "session", "reset"])
def test_a_thread_that_user_code_waits_for(
    decoder: Any, expected: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model.api.permits.PATIENCE", 0.01)
    calls: dict[str, Callable[[], Any]] = {
        "text": lambda: answer(decoder, OTHER),
        "session": lambda: answer(decoder.session(), OTHER),
        "reset": decoder.reset,
    }
    found: list[Any] = []

    def waiting(_: Any, scores: torch.Tensor) -> torch.Tensor:
        if not found:
            with ThreadPoolExecutor(1) as pool:
                try:
                    found.append(pool.submit(calls[what]).result())
                except RuntimeError as error:
                    found.append(str(error))
        return scores

    assert answer(decoder, logits_processors=[waiting]) == expected(PROMPT)
    if what == "text":
        assert "was not continued for 0.01 s" in found[0] and "decoder.session()" in found[0]
    else:
        assert found[0] == (expected(OTHER) if what == "session" else None)
    assert answer(decoder, OTHER) == expected(OTHER)


@pytest.mark.parametrize("way", ["never begun", "left", "collected in another thread"])
def test_streams_that_are_left(decoder: Any, expected: Any, way: str) -> None:
    pieces = streamed(decoder)
    if way != "never begun":
        next(pieces)
    cycle: list[Any] = [pieces]
    cycle.append(cycle)
    del pieces
    if way == "collected in another thread":
        del cycle
        with ThreadPoolExecutor(1) as pool:
            pool.submit(gc.collect).result()
        assert decoder.queue.permits.holder is None
    assert answer(decoder, OTHER) == expected(OTHER)


def test_a_stream_that_is_open_at_the_end_of_the_interpreter() -> None:
    code = (
        "from model import SpeculativeDecoder\n"
        "from tests.random_llama import random_llama\n"
        "decoder = SpeculativeDecoder(random_llama(67).eval(), None, 'recycling')\n"
        "pieces = decoder.stream([5, 6, 7, 5, 6], max_new_tokens=6)\n"
        "print(len(next(pieces).token_ids) > 0)\n"
    )
    root = Path(__file__).resolve().parents[3]
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "True\n"
    assert "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr


@pytest.mark.parametrize("place", ["processor", "pass"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_the_decoder_usable(
    decoder: Any, expected: Any, place: str, number: signal.Signals
) -> None:
    """As Ctrl-C; SIGTERM as a handler that ends the process in order takes it."""

    def stop(*_: Any) -> None:
        raise SystemExit("stopped") if number == signal.SIGTERM else KeyboardInterrupt

    def raising(*arguments: Any) -> Any:
        signal.raise_signal(number)
        return arguments[-1] if len(arguments) == 2 else None

    before = signal.signal(number, stop)
    layer = decoder.target.model.model.layers[0]
    handle = layer.register_forward_hook(lambda *_: raising()) if place == "pass" else None
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            answer(decoder, logits_processors=[raising] if place == "processor" else ())
    finally:
        signal.signal(number, before)
        if handle is not None:
            handle.remove()
    permits = decoder.queue.permits
    assert permits.holder is permits.stepper is permits.caller is None
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(answer, decoder, OTHER).result() == expected(OTHER)
    assert answer(decoder) == expected(PROMPT)
