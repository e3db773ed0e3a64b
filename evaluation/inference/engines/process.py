"""An engine in a process of its own, which answers in lines of JSON as long as its standard input is open.

In one process two programs with threads of OpenMP slow each other down: if these are more than the processors, a
thread no longer waits actively for the next parallel region. A pass of ours has over a hundred regions, and took
twice as long (SmolLM2-135M, Q4_1, two threads on two cores: 17.6 ms in place of 9).

`EngineProcess` is the process, `main` what it runs. An engine's module has a class `Engine` with `facts` and
`answer`, which is made with the participant's options.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any


class EngineProcess:
    """A process in which a module's engine has loaded a model; a RuntimeError with its words if it cannot.

    `facts` is what the engine says of itself, such as its version.
    """

    def __init__(self, module: str, options: Mapping[str, Any]) -> None:
        command = [sys.executable, "-c", f"from {__name__} import main; main()"]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [*command, module, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # Ctrl-C waits for the question that is answered
        )
        self.facts: dict[str, Any] = self._reply()

    def ask(self, **asked: Any) -> dict[str, Any]:
        """Return the engine's answer; a RuntimeError with its words if it has none."""
        assert self._process.stdin
        with suppress(BrokenPipeError):  # it ended, and has said why
            print(json.dumps(asked), file=self._process.stdin, flush=True)
        return self._reply()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        self._errors.close()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError((self._errors.read().strip().splitlines() or ["it ended"])[-1])
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply


def main() -> None:
    """Load a model, say the engine's facts, and answer until standard input ends, as with the process that asks."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what engines print
    module, options = sys.argv[1:]
    engine = import_module(module).Engine(**json.loads(options))
    print(json.dumps(engine.facts), file=replies, flush=True)
    for line in sys.stdin:
        try:
            reply = engine.answer(**json.loads(line))
        except Exception as error:
            reply = {"error": " ".join(str(error).split())}
        print(json.dumps(reply), file=replies, flush=True)
    os._exit(0)  # threads of an engine may outlive it
