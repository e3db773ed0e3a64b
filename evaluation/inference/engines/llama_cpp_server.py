"""llama.cpp's server in a process of its own, as long as its standard input is open.

In one process two programs with threads of OpenMP slow each other down: if these are more than the processors, a
thread no longer waits actively for the next parallel region. A pass of ours has over a hundred regions, and took
twice as long (SmolLM2-135M, Q4_1, two threads on two cores: 17.6 ms in place of 9).

`LlamaCppServer` is the process, `main` what it runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

ADDRESS = "http://"


class LlamaCppServer:
    """A process that serves a GGUF file at `address`; a ValueError if llama.cpp cannot load the file.

    A text has `context` tokens at most, prompt and answer together. `speculation` is llama.cpp's name of its
    speculation, in small letters.
    """

    def __init__(self, path: str, context: int, threads: int, speculation: str | None) -> None:
        given = {"path": path, "context": context, "threads": threads, "speculation": speculation}
        command = [sys.executable, "-c", f"from {__name__} import main; main()", json.dumps(given)]
        with tempfile.TemporaryFile("w+") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            assert self._process.stdout
            said = (line.strip() for line in self._process.stdout)
            self.address = next((line for line in said if line.startswith(ADDRESS)), "")
            if not self.address:
                errors.seek(0)
                last = (errors.read().strip().splitlines() or ["it ended"])[-1]
                raise ValueError(f"llama.cpp cannot load {path}: {last}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def started(path: str, context: int, threads: int, speculation: str | None = None) -> Any:
    """Start the server in this process; a RuntimeError if llama.cpp cannot load the file."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel = context, 1
    params.n_gpu_layers, params.verbosity = 0, 0
    for of_pass in (params.cpuparams, params.cpuparams_batch):
        of_pass.n_threads = threads
    if speculation:
        kind = f"COMMON_SPECULATIVE_TYPE_{speculation.upper()}"
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
    return xllamacpp.Server(params)


def main() -> None:
    """Print the server's address, and serve until standard input ends: as it does with the process that asked."""
    try:
        server = started(**json.loads(sys.argv[1]))
    except RuntimeError as error:
        sys.exit(str(error))
    print(server.listening_address, flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads on
    sys.stdin.read()
