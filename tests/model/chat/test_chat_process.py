"""The chat as a user runs it: a process on a pseudo-terminal, with real keys.

Run: pytest tests/model/chat/test_chat_process.py
"""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.hang import HANG, wait_for
from tests.model.chat.test_dialogue import DEMO
from tests.random_llama import random_llama

pty = pytest.importorskip("pty", reason="pseudo-terminals need a Unix")

ROOT = Path(__file__).resolve().parents[3]
# More than a pseudo-terminal holds unread, so that an answer waits for Ctrl-C half-way.
LONG = 4000
# Makes the pseudo-terminal on standard input the one whose keys send signals to the chat.
# A shell in a terminal enables Ctrl-C; tests started in the background may have inherited it as ignored.
TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "model.chat", *sys.argv[1:]])
"""


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with the demo tokenizer, that never ends an answer."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2}
    model = random_llama(8192, max_position_embeddings=8 * LONG, eos_token_id=None, **sizes)
    with torch.no_grad():
        model.lm_head.weight[:100].zero_()  # special tokens and bytes: never the largest logit
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, folder)
    return folder


class Terminal:
    """A pseudo-terminal with a chat on it."""

    def __init__(self, *options: str) -> None:
        self._ours, theirs = pty.openpty()
        self._unread = ""
        kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *options],
            cwd=ROOT,
            env={**kept, "TERM": "xterm", "OMP_NUM_THREADS": "1"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._ours, keys.encode())

    def sleeps(self) -> bool:
        """Whether the chat's main thread waits for something, after all that it had to do."""
        place = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/stat")
        return place.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "S"

    def read_until(self, pattern: str) -> str:
        """Return the output up to the first match of a pattern; the rest is read later."""
        while not (found := re.search(pattern, self._unread)):
            is_there = select.select([self._ours], [], [], HANG)[0]
            assert is_there, f"no {pattern!r} in {self._unread!r}"
            try:
                self._unread += os.read(self._ours, 256).decode(errors="replace")
            except OSError:  # Linux says so when the other side is closed
                pytest.fail(f"ended without {pattern!r}: {self._unread!r}")
        text, self._unread = self._unread[: found.end()], self._unread[found.end() :]
        return text

    def close(self) -> int:
        """Wait for the chat's end; return its exit code."""
        try:
            while select.select([self._ours], [], [], HANG)[0] and os.read(self._ours, 4096):
                pass
        except OSError:
            pass
        os.close(self._ours)
        return self.process.wait(timeout=HANG)


@pytest.fixture
def terminal(endless_model: Path) -> Iterator[Terminal]:
    """A chat with the endless model on a pseudo-terminal; it is ended if the test fails."""
    found = Terminal("--model-path", str(endless_model), "--max-new-tokens", str(LONG))
    yield found
    if found.process.poll() is None:
        found.process.kill()
        found.process.wait()


def test_a_whole_chat(terminal: Terminal) -> None:
    terminal.read_until("> ")
    stopped = r"\[hybrid: \d+ tokens .*, stopped\]"
    for message in ("hello", "and again"):
        terminal.type(f"{message}\n")
        # Both colours: two steps were written. No more can be written until they are read.
        begun = terminal.read_until(r"\x1b\[36m(.|\n)*\x1b\[35m")
        terminal.type("\x03")
        ended = terminal.read_until(stopped)
        terminal.read_until("> ")
        assert "Traceback" not in begun + ended
    terminal.type("/reset\n")
    terminal.read_until("is forgotten")
    terminal.type("/method pld\n")
    terminal.read_until("pld from here on")
    terminal.read_until("> ")
    terminal.type("half a line")
    terminal.read_until("half a line")  # the line is being read now
    # Python's readline notices Ctrl-C only while it waits for a key, and loses it while it reads one.
    wait_for(terminal.sleeps)
    terminal.type("\x03")
    terminal.read_until("Ctrl-C again leaves")
    terminal.type("hello\n")
    terminal.read_until(r"\x1b\[36m")
    terminal.type("\x03")
    terminal.read_until(stopped.replace("hybrid", "pld"))
    terminal.read_until("> ")
    terminal.type("/exit\n")
    assert terminal.close() == 0
