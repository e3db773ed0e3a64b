"""The options of an endpoint, and how its address is spelled."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from model.commands.command_line import UserError
from model.options import Options, option

SCHEMES = ("http://", "https://")


@dataclass(frozen=True, slots=True)
class EndpointConfig(Options):
    """Where a server is, and what is asked of it.

    Raises:
        ValueError: if a value is not allowed.
    """

    base_url: str = option(
        "", "address of an OpenAI-compatible server, such as http://127.0.0.1:8000", metavar="URL"
    )
    served_model: str | None = option(
        None, "name of the model there (default: the one that /v1/models lists)"
    )
    api_key_env: str | None = option(
        None, "environment variable that holds the API key (default: no key)"
    )
    timeout: int = option(600, "seconds that the server may be silent", least=1)

    def _check(self) -> None:
        if not self.base_url.startswith(SCHEMES):
            raise ValueError(
                f"base_url: got {self.base_url!r}; allowed: an address such as http://127.0.0.1:8000"
            )
        object.__setattr__(self, "base_url", self.base_url.rstrip("/").removesuffix("/v1"))

    @property
    def api_key(self) -> str | None:
        """The key; a `UserError` if the variable is not set."""
        if self.api_key_env is None:
            return None
        if not (key := os.environ.get(self.api_key_env)):
            raise UserError(
                f"api_key_env: got {self.api_key_env}, which is not set; export it, or leave the option out"
            )
        return key


@dataclass(frozen=True, slots=True)
class EndpointMethod:
    """A server as a method of a comparison: it decodes as it likes, and is named by its address."""

    name: str

    config_class: ClassVar[type] = EndpointConfig


def is_address(words: str) -> bool:
    """Whether an entrant's words name a server."""
    return words.startswith(SCHEMES)
