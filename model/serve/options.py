"""Options of the server: where it listens, and the limits of requests."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from ..options import Options, option, temperature_of

LOCALHOST = "127.0.0.1"
# Where a key may be given that is not to be seen in a list of processes.
KEY_VARIABLE = "TOKEN_RECYCLING_API_KEY"


@dataclass(frozen=True, slots=True)
class ServeOptions(Options):
    """Where the server listens, what it takes, and for how long."""

    host: str = option(
        LOCALHOST, "address to listen at; addresses other than this machine's own need a key"
    )
    port: int = option(8000, "port to listen at; 0: a free one", least=0, most=65535)
    served_model_name: str | None = option(
        None, "the model's name in requests (default: MODEL as it is given)"
    )
    api_key: str | None = option(
        None, f"key that requests need (default: the value of {KEY_VARIABLE}, if set)"
    )
    batch_size: int = option(8, "maximum of texts that share a pass; others wait", least=1)
    max_queue: int = option(256, "maximum of waiting requests; more are refused with 503", least=0)
    max_connections: int = option(
        512, "maximum of open connections; the longest idle one makes room", least=1
    )
    max_new_tokens: int | None = option(
        None,
        "maximum of new tokens of a text (default: what the model's context has room for)",
        least=1,
    )
    max_prompt_tokens: int | None = option(
        None, "maximum of tokens of a prompt (default: the model's context)", least=1
    )
    max_body_bytes: int = option(2**20, "maximum of bytes of a request", least=1)
    cache_mib: int = option(
        512, "MiB of KV caches of earlier texts, kept for texts that begin alike", least=0
    )
    request_seconds: int = option(600, "longest time of a request", least=1)
    shutdown_seconds: int = option(
        30, "time that running requests have after SIGTERM or Ctrl-C", least=1
    )
    temperature: float = option(
        1.0, "temperature of requests that give none (OpenAI's default; 0: greedy)"
    )

    def _check(self) -> None:
        temperature_of(self.temperature)
        if not self.api_key and not is_loopback(self.host):
            raise ValueError(
                f"host: got {self.host} without a key, so that anyone there could use the server; allowed: "
                f"{LOCALHOST}, or any with api_key (or {KEY_VARIABLE} in the environment)"
            )


def is_loopback(host: str) -> bool:
    """Whether an address or a name is this machine's own."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False
