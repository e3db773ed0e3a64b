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

from .protocol import ChatRequest, CompletionRequest, Refusal, TextRequest, parse_request
from .service import Service

JSON = "application/json"


def make_app(service: Service) -> FastAPI:
    """Return the application that serves a model; its thread is started by whoever runs it."""
    app = FastAPI(openapi_url=None)

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> Response:
        return JSONResponse(refusal.body(), refusal.status)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        said = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(Refusal(said, error.status_code).body(), error.status_code)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.thread.is_alive() else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.thread.counters.page(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        _check_key(request, service.options.api_key)
        return JSONResponse(service.models())

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(service, request, ChatRequest)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(service, request, CompletionRequest)

    return app


async def _answer(service: Service, request: Request, kind: type[TextRequest]) -> Response:
    options = service.options
    _check_key(request, options.api_key)
    # A page of a foreign site may send other types without asking.
    if request.headers.get("content-type", "").partition(";")[0].strip() != JSON:
        raise Refusal(f"content-type: allowed: {JSON}", 415)
    deadline = time.monotonic() + options.request_seconds
    try:
        body = await asyncio.wait_for(
            _body(request, options.max_body_bytes), options.request_seconds
        )
    except ClientDisconnect:
        raise Refusal("the client has left", 499) from None
    except asyncio.TimeoutError:
        raise Refusal(f"body: took longer than {options.request_seconds:g} s", 408) from None
    asked = parse_request(kind, body)
    reply = await service.begin(asked, deadline)
    reply.watch(request.receive)
    if asked.stream:
        return StreamingResponse(reply.events(), media_type="text/event-stream")
    return JSONResponse(await reply.whole())


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


def _check_key(request: Request, key: str | None) -> None:
    if not key:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), key.encode()):
        raise Refusal(
            "authorization: the key is missing or wrong; allowed: Bearer and the server's key",
            401,
            "invalid_api_key",
        )
