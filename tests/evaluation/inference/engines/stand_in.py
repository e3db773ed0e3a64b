"""An engine's module in the process of the tests, in place of `EngineProcess`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from typing import Any


class InThisProcess:
    """In place of `EngineProcess`; what it is asked and answers is written as JSON and read again."""

    def __init__(self, module: str, options: Mapping[str, Any]) -> None:
        self._engine = import_module(module).Engine(**json.loads(json.dumps(options)))
        self.facts = json.loads(json.dumps(self._engine.facts))

    def ask(self, **asked: Any) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = json.loads(json.dumps(self._engine.answer(**asked)))
        except Exception as error:
            raise RuntimeError(str(error)) from error
        return reply

    def close(self) -> None:
        return
