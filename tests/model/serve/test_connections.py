"""Connections of the server are limited: silent ones make room, and large prompts stop nobody.

Run: pytest tests/model/serve/test_connections.py
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")

import uvicorn

from model.serve.connections import limited
from tests.hang import HANG, wait_for

MOST = 5


@contextmanager
def listening(head_seconds: float = HANG, longest_seconds: float = HANG) -> Iterator[int]:
    """Serve an application whose answers wait for `release`, at a port."""

    async def application(scope: dict, receive: object, send: object) -> None:  # type: ignore[type-arg]
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b"well"})  # type: ignore[operator]

    protocol = limited(MOST, head_seconds, longest_seconds)
    config = uvicorn.Config(application, log_level="warning", lifespan="off", http=protocol)  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as place:
        running = threading.Thread(target=server.run, kwargs={"sockets": [place]})
        running.start()
        wait_for(lambda: server.started)
        yield place.getsockname()[1]
        server.should_exit = True
        running.join(HANG)
        assert not running.is_alive()


def is_closed(one: socket.socket) -> bool:
    """Whether the other side has closed a connection."""
    one.setblocking(False)
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_silent_connections_make_room_the_oldest_first() -> None:
    with listening() as port, ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(4 * MOST)
        ]
        wait_for(lambda: sum(map(is_closed, silent)) == 3 * MOST)
        assert [is_closed(one) for one in silent] == [True] * (3 * MOST) + [False] * MOST
        assert httpx.get(f"http://127.0.0.1:{port}/", timeout=HANG).text == "well"


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: a\r\nX-A: "])
def test_a_head_that_does_not_come_ends_a_connection(sent: bytes) -> None:
    with listening(head_seconds=0.3) as port, socket.create_connection(("127.0.0.1", port)) as one:
        one.sendall(sent)
        wait_for(lambda: is_closed(one))


def test_a_head_after_an_answer_has_its_time_too() -> None:
    with listening(head_seconds=0.3) as port, socket.create_connection(("127.0.0.1", port)) as one:
        one.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        one.settimeout(HANG)
        assert one.recv(2**16).startswith(b"HTTP/1.1 200")
        one.sendall(b"GET / HT")

        def has_ended() -> bool:
            one.setblocking(False)
            try:
                return one.recv(2**16) == b""
            except BlockingIOError:
                return False
            except ConnectionError:
                return True

        wait_for(has_ended)
