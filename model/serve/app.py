"""The endpoints: reads requests within their limits, and answers them in JSON or as a stream."""

from __future__ import annotations

import asyncio
import hmac
import time

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from .options import ServeOptions, is_loopback
from .protocol import (
    ChatRequest,
    CompletionRequest,
    Refusal,
    TextRequest,
    TokenizeChat,
    TokenizeRequest,
    TokenizeText,
    parse_request,
)
from .service import Service

JSON = "application/json"
ENDPOINTS = "allowed: POST /v1/chat/completions, POST /v1/completions, GET /v1/models"


def make_app(service: Service) -> FastAPI:
    """Return the application that serves a model; its thread is started by whoever runs it."""
    app = FastAPI(openapi_url=None)

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> Response:
        headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
        return JSONResponse(refusal.body(), refusal.status, headers)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        said = f"{request.method} {request.url.path[:100]}: {error.detail}; {ENDPOINTS}"
        return JSONResponse(Refusal(said, error.status_code).body(), error.status_code)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.thread.is_alive() else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.thread.counters.page(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        _check_access(request, service.options)
        return JSONResponse(service.models())

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        _check_access(request, service.options)
        return JSONResponse(service.model(name))

    @app.post("/reset_prefix_cache")
    async def reset(request: Request) -> Response:
        _check_access(request, service.options)
        await asyncio.to_thread(service.thread.reset)
        return Response()

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await _read(service.options, request)
        kind: type[TokenizeRequest] = TokenizeChat if b'"messages"' in body else TokenizeText
        return JSONResponse(await service.tokens(parse_request(kind, body), len(body)))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(service, request, ChatRequest)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(service, request, CompletionRequest)

    return app


async def _answer(service: Service, request: Request, kind: type[TextRequest]) -> Response:
    deadline = time.monotonic() + service.options.request_seconds
    body = await _read(service.options, request)
    asked = parse_request(kind, body)
    leaving = asyncio.create_task(_left(request))
    begun = asyncio.create_task(service.begin(asked, deadline, len(body)))
    await asyncio.wait((leaving, begun), return_when=asyncio.FIRST_COMPLETED)
    if not begun.done():  # a text that waits to become tokens is not read any more
        begun.cancel()
        raise Refusal("the client has left", 499)
    reply = begun.result()
    reply.watch(leaving)
    if asked.stream:
        return StreamingResponse(reply.events(), media_type="text/event-stream")
    return JSONResponse(await reply.whole())


async def _left(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read(options: ServeOptions, request: Request) -> bytes:
    """Return the body of a request, once it may be answered."""
    _check_access(request, options)
    # A page of a foreign site may send other types without asking.
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind.lower() != JSON:
        raise Refusal(f"content-type: allowed: {JSON}", 415)
    seconds = options.request_seconds
    try:
        return await asyncio.wait_for(_body(request, options.max_body_bytes), seconds)
    except ClientDisconnect:
        raise Refusal("the client has left", 499) from None
    except asyncio.TimeoutError:
        raise Refusal(f"body: took longer than {seconds:g} s", 408) from None


async def _body(request: Request, most: int) -> bytes:
    """Return the body of a request; raises Refusal if it is larger than allowed.

    That is read to its end all the same, and not kept: a client that still sends would get a broken connection.
    """
    body, num_bytes = bytearray(), 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes <= most:
            body += part
    if num_bytes > most:
        raise Refusal(f"body: got {num_bytes} bytes; allowed: at most {most}", 413)
    return bytes(body)


def _check_access(request: Request, options: ServeOptions) -> None:
    """Refuse requests without the key or, of a server without one, to a name that is not this machine's."""
    key = options.api_key
    if not key:
        if not is_loopback(host := request.url.hostname or ""):
            # A page of a foreign site may let its own name lead here.
            raise Refusal(f"host: got {host[:100]}; allowed: localhost, of a server without a key")
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), key.encode()):
        raise Refusal(
            "authorization: the key is missing or wrong; allowed: Bearer and the server's key",
            401,
            "invalid_api_key",
        )
