"""The command: its options, what it refuses before weights load, and how it ends.

Run: pytest tests/model/serve/test_command.py
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from model.commands.command_line import UserError
from model.methods import BUILT_IN
from model.serve import __main__ as command
from model.serve.options import ServeOptions
from tests.hang import HANG
from tests.model.api.test_decoder import DEMO

ROOT = Path(__file__).resolve().parents[3]
CHANGED = ServeOptions(
    host="0.0.0.0",
    port=1,
    served_model_name="mine",
    api_key="secret",
    batch_size=2,
    max_queue=3,
    max_connections=9,
    cache_mib=8,
    max_new_tokens=4,
    max_prompt_tokens=5,
    max_body_bytes=6,
    request_seconds=7,
    shutdown_seconds=8,
    temperature=0.5,
)


def test_every_option_reaches_the_server() -> None:
    words = [str(DEMO), "--method", "pld", "--num-pred-tokens", "3", "--dtype", "bfloat16"]
    for name in ServeOptions.__slots__:
        assert getattr(CHANGED, name) != getattr(ServeOptions(), name), f"{name} is not tested"
        words += ["--" + name.replace("_", "-"), str(getattr(CHANGED, name))]
    asked = command.parse(words)
    assert asked.serve == CHANGED and asked.name == "mine" and asked.model.dtype == "bfloat16"
    assert (
        asked.method and asked.method.name == "pld" and asked.method_options["num_pred_tokens"] == 3
    )


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_RECYCLING_API_KEY", "hidden")
    assert command.parse([str(DEMO), "--host", "0.0.0.0"]).serve.api_key == "hidden"
    assert command.parse([str(DEMO), "--api-key", "shown"]).serve.api_key == "shown"


@pytest.mark.parametrize("method", BUILT_IN)
def test_options_of_no_method_have_the_name_of_one_of_the_server(method: str) -> None:
    with pytest.raises(SystemExit) as ended:
        command.parse(["--method", method, "--help"])
    assert ended.value.code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--host 0.0.0.0", "host: got 0.0.0.0 without a key"),
        ("--port 70000", "port: got 70000; allowed: 0 to 65535"),
        ("--temperature -1", "temperature: got -1"),
        ("--method nope", "method: got 'nope'"),
        ("--method pld --num-pred-tokens 0", "num_pred_tokens: got 0"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_line(words: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        command.parse([str(DEMO), *words.split()])


def test_a_taken_port_and_missing_packages_are_said_before_weights_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("model.commands.loading.check_model", None)
    if not any(command.find_spec(name) is None for name in command.PACKAGES):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            with pytest.raises(UserError, match=f"got 127.0.0.1, {port}: Address already in use"):
                command.run([str(DEMO), "--port", port])
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs fastapi, uvicorn, prometheus-client; pip install"):
        command.run([str(DEMO)])


def test_a_signal_lets_answers_end_and_the_exit_code_is_0() -> None:
    pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")
    words = [sys.executable, "-m", "model", "serve", str(DEMO), "--port", "0", "--threads", "1"]
    words += ["--temperature", "0", "--method", "vanilla", "--served-model-name", "demo"]
    words += ["--shutdown-seconds", str(int(HANG))]
    server = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        line = next(line for line in server.stderr if " at http" in line)
        address = line.split(" at ")[1].strip()
        fields = {"model": "demo", "prompt": "A boat", "max_tokens": 300, "ignore_eos": True}
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        request = urllib.request.Request(
            f"{address}/completions",
            json.dumps(fields).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=HANG) as reply:
            reply.readline()
            server.send_signal(signal.SIGTERM)
            rest = reply.read().decode()
        assert '"completion_tokens": 300' in rest and rest.endswith("data: [DONE]\n\n")
        assert server.wait(HANG) == 0
    finally:
        server.kill()
        server.wait()
        if server.stderr is not None:
            server.stderr.close()
