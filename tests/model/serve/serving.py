"""A server in this process, at a free port."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx
import uvicorn

from model.serve.__main__ import KEEP_ALIVE, listening_socket
from model.serve.app import make_app
from model.serve.options import ServeOptions
from model.serve.service import Service
from tests.hang import HANG, wait_for
from tests.model.api.test_decoder import decoder_for, demo

NAME = "demo"


class Served(NamedTuple):
    """A server under test."""

    service: Service
    client: httpx.Client

    def ask(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        """Post a request; the model's name is given, and greedy decoding."""
        given = {"model": NAME, "temperature": 0, **fields}
        return self.client.post(path, json=given)

    def counters(self) -> dict[str, float]:
        """Return the counters, those by position under `name[position]`."""
        found = {}
        for line in self.client.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, _, rest = line.partition("{")
                labels, _, value = rest.rpartition("} ")
                _, _, position = labels.partition('position="')
                found[name + (f"[{position[:-1]}]" if position else "")] = float(value)
        return found


@contextmanager
def serving(method: str = "recycling", **options: Any) -> Iterator[Served]:
    """Serve the demo model with a method."""
    given = ServeOptions(**{"port": 0, "request_seconds": int(HANG), **options})
    service = Service(decoder_for(method, *demo()), given, NAME)
    # As the command: with uvicorn's 5 s a connection may be closed while httpx, which keeps one as long, uses it.
    config = uvicorn.Config(
        make_app(service), log_level="warning", lifespan="off", timeout_keep_alive=KEEP_ALIVE
    )
    server = uvicorn.Server(config)
    with listening_socket(given) as place:
        port = place.getsockname()[1]
        running = threading.Thread(target=server.run, kwargs={"sockets": [place]})
        service.thread.start()
        running.start()
        wait_for(lambda: server.started)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG) as client:
                yield Served(service, client)
        finally:  # a process with a thread that runs does not end
            server.should_exit = True
            running.join(HANG)
            service.thread.close()
            service.thread.join(HANG)
        assert not running.is_alive() and not service.thread.is_alive()
