"""Ask a server hundreds of things at a time, leave, break off and send nonsense, and watch its texts and memory.

Texts of whole answers are compared with the library's. A leak shows in a table with a line for every block of
requests. Linux only (/proc).

Example:
    python -m tests.commands.soak_server --num-requests 4000 --concurrency 200 --block 1000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch

from evaluation.reporting.tables import markdown_table
from model import SpeculativeDecoder
from tests.clients.known import SCHEMA
from tests.clients.run import MODEL, read_questions, server
from tests.commands.soak import FLAT_GROWTH

# What clients do, and how often.
DEEDS = {"whole": 4, "stream": 4, "form": 2, "predict": 2, "leave": 2, "kill": 2, "nonsense": 2}
# New tokens at most; each request has one of these limits.
LIMITS = (3, 17, 40)
# A closed connection at which the other side gets a reset instead of an end.
RESET = struct.pack("ii", 1, 0)
BAD_FIELDS: list[dict[str, Any]] = [
    {"prompt": []},
    {"prompt": [10**9]},
    {"n": 0},
    {"temperature": -1},
    {"max_tokens": 10**9},
    {"nonsense": 1},
    {"model": "other"},
    {"prompt": "a" * 2**21},
    {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "what"}}}},
    {"prediction": "a text"},
    {"tools": [{}]},
]
FORM = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}


class Block(NamedTuple):
    """Figures at the end of a block of requests."""

    requests: int  # so far
    wrong: int  # texts other than the library's, and nonsense that was answered
    resident_bytes: int  # memory of the server
    open_files: int  # descriptors of the server
    seconds: float


class Asker:
    """Clients of a server.

    Args:
        address: of the server, without `/v1`.
        expected: prompts, with the whole text of each to each of `LIMITS`, and last that which obeys `FORM`.
        seed: of what is done.
    """

    def __init__(self, address: str, expected: dict[str, list[str]], seed: int = 0) -> None:
        self.done: Counter[str] = Counter()
        self.num_wrong = 0
        self._expected = expected
        self._chosen = random.Random(seed)
        self._host, _, port = address.removeprefix("http://").partition(":")
        self._port = int(port)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=address, timeout=600, limits=limits)

    async def ask(self, total: int, concurrency: int) -> None:
        """Do this many things, `concurrency` at a time."""
        room = asyncio.Semaphore(concurrency)

        async def one() -> None:
            async with room:
                await self._one()

        await asyncio.gather(*(one() for _ in range(total)))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _one(self) -> None:
        chosen = self._chosen
        (deed,) = chosen.choices(list(DEEDS), list(DEEDS.values()))
        prompt, place = chosen.choice(list(self._expected)), chosen.randrange(len(LIMITS))
        fields = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": LIMITS[place]}
        expected = self._expected[prompt][place]
        self.done[deed] += 1
        try:
            await self._do(deed, fields, expected)
        except httpx.HTTPError as error:
            print(f"{deed}: {error!r}", file=sys.stderr)
            self._check(False)

    async def _do(self, deed: str, fields: dict[str, Any], expected: str) -> None:
        chosen = self._chosen
        if deed == "form":
            expected = self._expected[fields["prompt"]][-1]
            fields = {**fields, "response_format": FORM, "max_tokens": LIMITS[-1]}
        if deed == "predict":
            other = chosen.choice([*self._expected.values()])
            fields = {**fields, "prediction": {"type": "content", "content": other[-2]}}
        if deed in ("whole", "form", "predict"):
            reply = await self._http.post("/v1/completions", json=fields)
            self._check(reply.json()["choices"][0]["text"] == expected)
        elif deed == "stream":
            self._check(await self._streamed(fields) == expected)
        elif deed == "leave":
            await self._streamed(fields, chosen.randrange(4))
        elif deed == "kill":
            await self._killed(json.dumps({**fields, "stream": chosen.random() < 0.5}).encode())
        else:
            await self._nonsense(fields)

    def _check(self, is_right: bool) -> None:
        self.num_wrong += not is_right

    async def _streamed(self, fields: dict[str, Any], num_lines: int | None = None) -> str:
        """Return the text of a stream; with a number of lines leave after them."""
        text = ""
        request = {**fields, "stream": True}
        async with self._http.stream("POST", "/v1/completions", json=request) as reply:
            async for line in reply.aiter_lines():
                if num_lines == 0:
                    break
                num_lines = None if num_lines is None else num_lines - 1
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    async def _killed(self, body: bytes) -> None:
        """Send a request, or a part of it, and break the connection off."""
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
        whole = head.encode() + b"Content-Type: application/json\r\n\r\n" + body
        _, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(whole[: self._chosen.choice((9, len(whole) - 5, len(whole)))])
        await writer.drain()
        await asyncio.sleep(self._chosen.random() * 0.2)
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.close()

    async def _nonsense(self, fields: dict[str, Any]) -> None:
        """Send what is no request; it must be refused in OpenAI's form."""
        bad = self._chosen.choice([*BAD_FIELDS, None])
        noise = self._chosen.randbytes(self._chosen.randrange(200))
        body = noise if bad is None else json.dumps({**fields, **bad}).encode()
        headers = {"content-type": "application/json"}
        reply = await self._http.post("/v1/completions", content=body, headers=headers)
        self._check(400 <= reply.status_code < 500 and bool(reply.json()["error"]["message"]))


def expected_texts(num_prompts: int) -> dict[str, list[str]]:
    """Return prompts, and what plain decoding of the demo model says to each with each limit."""
    decoder = SpeculativeDecoder.from_pretrained(MODEL, "vanilla", dtype=torch.float32)
    prompts = [one["prompt"] for one in read_questions(num_prompts)]
    found = {
        prompt: [decoder.generate(prompt, max_new_tokens=limit).text for limit in LIMITS]
        for prompt in prompts
    }
    for prompt, texts in found.items():
        formed = decoder.generate(prompt, max_new_tokens=LIMITS[-1], grammar=SCHEMA)
        texts.append(formed.text)
    return found


async def soak(address: str, process: int, options: argparse.Namespace) -> list[Block]:
    """Ask in blocks; return the figures of the server after each."""
    asker = Asker(address, expected_texts(options.num_prompts))
    blocks = []
    for begin in range(0, options.num_requests, options.block):
        started = time.monotonic()
        size = min(options.block, options.num_requests - begin)
        await asker.ask(size, options.concurrency)
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        resident = pages * os.sysconf("SC_PAGESIZE")
        num_files = len(os.listdir(f"/proc/{process}/fd"))
        seconds = time.monotonic() - started
        blocks.append(Block(begin + size, asker.num_wrong, resident, num_files, seconds))
        print(blocks[-1], file=sys.stderr, flush=True)
    await asker.close()
    print(f"\n{dict(asker.done)}", file=sys.stderr)
    return blocks


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 1 if a text was wrong or memory grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.commands.soak_server")
    parser.add_argument("--num-requests", type=int, default=2000, help="(%(default)s)")
    parser.add_argument("--concurrency", type=int, default=200, help="(%(default)s)")
    parser.add_argument("--block", type=int, default=500, help="(%(default)s)")
    parser.add_argument("--num-prompts", type=int, default=30, help="(%(default)s)")
    parser.add_argument("--method", default="hybrid", help="(%(default)s)")
    parser.add_argument("--cache-mib", type=int, default=64, help="(%(default)s)")
    options = parser.parse_args(argv)
    with server("--method", options.method, "--cache-mib", str(options.cache_mib)) as (
        address,
        process,
    ):
        blocks = asyncio.run(soak(address, process, options))
    rows = [
        [
            *map(str, block[:2]),
            f"{block.resident_bytes / 2**20:.0f} MiB",
            str(block.open_files),
            f"{block.seconds:.1f} s",
        ]
        for block in blocks
    ]
    print(markdown_table(["requests", "wrong", "memory", "open files", "time"], rows))
    first, last = blocks[min(1, len(blocks) - 1)], blocks[-1]
    is_flat = last.resident_bytes <= (1 + FLAT_GROWTH) * first.resident_bytes
    print("no wrong text" if not last.wrong else "WRONG TEXTS", "flat" if is_flat else "GROWS")
    return 0 if is_flat and not last.wrong else 1


if __name__ == "__main__":
    sys.exit(main())
