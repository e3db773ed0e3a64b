"""The command that serves a model to OpenAI's clients.

Run:
    python -m model.serve data/demo/model --port 8000
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from ..commands.command_line import (
    LIBRARY,
    OptionParser,
    UserError,
    add_options,
    command_of,
    config_of,
    parse_with_method,
    run_command,
)
from ..commands.model_options import FOR_A_TEXT, MODEL_PATHS, ModelOptions
from ..machine.hardware import give_back_threads
from ..methods import Method
from .options import KEY_VARIABLE, ServeOptions

if TYPE_CHECKING:
    from .service import Service

# Of the extra `serve`, by the names of their modules.
PACKAGES = {"fastapi": "fastapi", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}
# Seconds for which an idle connection stays open: longer than clients keep theirs (httpx 5, aiohttp 15, curl 118 at
# most), as one that both use and close at once breaks a request.
KEEP_ALIVE = 120
# Connections that wait to be accepted, seconds for the head of a request, and files beside those of connections.
BACKLOG, HEAD_SECONDS, OTHER_FILES = 128, 10, 64
COMMAND = command_of("serve")
EXAMPLES = f"""\
examples:
  # the demo model, for clients of OpenAI's API at http://127.0.0.1:8000/v1
  {COMMAND} data/demo/model

  # greedy where a request names no temperature; a method with an option of its own
  {COMMAND} data/demo/model --temperature 0 --method pld --num-pred-tokens 8
"""


class ServerArguments(NamedTuple):
    """What the command line asks for."""

    name: str  # the model's in requests
    model: ModelOptions
    serve: ServeOptions
    method: Method | None  # None: what pays on the device
    method_options: dict[str, Any]


def run(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C; return the exit code, or raise UserError for what cannot be used."""
    asked = parse(argv)
    missing = [name for module, name in PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise UserError(f"serve: needs {', '.join(missing)}; pip install {' '.join(missing)}")
    with listening_socket(asked.serve) as place:
        from ..budget.measure import use_fastest_threads  # torch takes seconds
        from ..commands.loading import check_model, load_decoder
        from .service import Service

        checked = check_model(asked.model)
        decoder = load_decoder(asked.model, checked, asked.method, asked.method_options)
        if asked.model.threads is None and (chosen := use_fastest_threads(decoder.target)):
            print(chosen, file=sys.stderr)
        return serve(Service(decoder, asked.serve, asked.name), place, asked)


def parse(argv: Sequence[str] | None) -> ServerArguments:
    """Return what the command line asks for; raises UserError if a value is not allowed."""
    parser = OptionParser(
        prog=COMMAND,
        description="Serve a model to OpenAI's clients: for measuring, and for your own machine.",
        epilog=EXAMPLES,
    )
    parser.add_argument("model_path", metavar="MODEL", help=f"the model: {MODEL_PATHS}")
    add_options(parser, ServeOptions)
    add_options(parser, ModelOptions, FOR_A_TEXT)
    given, method, options = parse_with_method(parser, argv)
    given.setdefault("api_key", os.environ.get(KEY_VARIABLE) or None)
    model, serving = config_of(ModelOptions, given), config_of(ServeOptions, given)
    return ServerArguments(
        serving.served_model_name or given["model_path"], model, serving, method, options
    )


def listening_socket(options: ServeOptions) -> socket.socket:
    """Return a socket at the address, or raise UserError; clients are refused until the server listens."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM
        )[0]
        place = socket.socket(family, kind, protocol)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(address)
    except OSError as error:
        raise UserError(
            f"host, port: got {options.host}, {options.port}: {error.strerror}; give another port"
        ) from error
    return place


def serve(service: Service, place: socket.socket, asked: ServerArguments) -> int:
    """Answer requests until a signal comes, and then those under way; return the exit code."""
    import uvicorn

    from .app import make_app
    from .connections import limited

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(asked.serve.max_connections, max(1, files - OTHER_FILES))
    config = uvicorn.Config(
        make_app(service),
        http=limited(most, HEAD_SECONDS, asked.serve.request_seconds + HEAD_SECONDS),
        log_level="warning",
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=asked.serve.shutdown_seconds,
    )
    # The server hands a signal on when it has ended. By then all is done.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    give_back_threads()  # the decoding thread has its own
    service.thread.start()
    place.listen(BACKLOG)
    host, port = place.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"{LIBRARY}: {asked.name} at http://{shown}:{port}/v1", file=sys.stderr, flush=True)
    uvicorn.Server(config).run(sockets=[place])
    service.thread.close()
    service.thread.join(asked.serve.shutdown_seconds)
    return 0


if __name__ == "__main__":
    run_command(run)
