"""The chat: answers, commands, colours and keys.

Run: pytest tests/model/chat/test_chat.py
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.api.decoder import SpeculativeDecoder
from model.api.output import StreamPiece
from model.chat import __main__ as chat
from model.chat.__main__ import Chat
from model.chat.dialogue import default_drafter
from tests.model.chat.test_dialogue import DEMO

SHORT = ("--threads", "1", "--max-new-tokens", "12")
QUESTION = "Tell me about the sea."
FIGURES = re.compile(
    r"\[([\w-]+): (\d+) tokens in [\d.]+ s, [\d.]+ tokens/s, (\d+) steps, MAT ([\d.]+)(.*)\]"
)
Script = Callable[..., None]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Return a function that sets the user's input; an exception stands for a key."""

    def say(*lines: str | type[BaseException]) -> None:
        script = iter(lines)

        def read(prompt: str = "") -> str:
            line = next(script, EOFError)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)

    return say


def figures_of(err: str) -> list[tuple[str, int, int, float, str]]:
    """Return the status lines: method, tokens, steps, MAT and note."""
    return [
        (method, int(tokens), int(steps), float(mean), note)
        for method, tokens, steps, mean, note in FIGURES.findall(err)
    ]


@pytest.mark.parametrize("method", ["recycling", "vanilla"])
def test_one_answer_stands_alone_on_stdout(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.run([*SHORT, "--method", method, "--prompt", QUESTION]) == 0
    out, err = capsys.readouterr()
    decoder = SpeculativeDecoder.from_pretrained(DEMO, "vanilla", dtype=torch.float32)
    prompt = decoder.tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=False
    )
    ids = decoder.tokenizer(prompt, add_special_tokens=False).input_ids
    answer = decoder.generate(ids, max_new_tokens=12)
    assert out == answer.text.lstrip() + "\n"
    ((name, num_tokens, num_steps, mean, _),) = figures_of(err)
    assert (name, num_tokens) == (method, len(answer.token_ids))
    assert mean == pytest.approx(num_tokens / num_steps, abs=0.006)
    assert num_steps == num_tokens or method != "vanilla"


def test_lines_are_answered_and_commands_obeyed(
    typed: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("", "  Hello.  ", "/method pld", QUESTION, "/help", "/reset", "/exit", "not read")
    assert chat.run(list(SHORT)) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) >= 2 and "\x1b" not in out + err
    assert [row[0] for row in figures_of(err)] == ["hybrid", "pld"]
    for text in ("pld from here on", "/method NAME", "exit code 130", "is forgotten"):
        assert text in err


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("/resett", "command: got '/resett'; allowed: .*; did you mean /reset?"),
        ("/reset all", "/reset: got 'all'; allowed: nothing after it"),
        ("/method", "method: got ''; allowed: vanilla, "),
        ("/method pdl", "did you mean pld"),
        ("/method sps", "method sps: has no default for an option"),
    ],
)
def test_a_wrong_command_is_one_line_and_the_chat_goes_on(
    line: str, error: str, typed: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(line, "/exit")
    assert Chat(fake_dialogue()).run() == 0
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and re.search(error, err)


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ([EOFError], 0),
        (["/exit"], 0),
        ([KeyboardInterrupt, KeyboardInterrupt], 130),
        ([KeyboardInterrupt, EOFError], 0),
        ([KeyboardInterrupt, "Hello.", KeyboardInterrupt, "/exit"], 0),
    ],
)
def test_the_exit_code_says_how_the_user_left(keys: list[Any], code: int, typed: Script) -> None:
    typed(*keys)
    assert Chat(fake_dialogue()).run() == code


def fake_dialogue(*pieces: StreamPiece, on_piece: Callable[[], None] = lambda: None) -> Any:
    """Return a conversation whose every answer is these pieces."""

    def answer(text: str) -> Iterator[StreamPiece]:
        for piece in pieces:
            on_piece()
            yield piece

    def use(method: str) -> None:
        default_drafter(method, 100, torch.device("cpu"))

    decoder = SimpleNamespace(method="recycling")
    return SimpleNamespace(answer=answer, use=use, reset=lambda: None, decoder=decoder)


def piece_of(text: str, num_tokens: int = 1, reason: str | None = None) -> StreamPiece:
    """Return the piece of a step of this many tokens."""
    record: Any = SimpleNamespace(stop_reason=reason)
    return StreamPiece(text, [0] * num_tokens, record)


def test_escape_sequences_of_a_model_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hostile = fake_dialogue(piece_of("\x1b]0;mine\x07"), piece_of("\x1b[2J\r\x9b2J", reason="eos"))
    assert Chat(hostile).answer("Hello.") == "eos"
    assert capsys.readouterr().out == "\\x1b]0;mine\\x07\\x1b[2J\\r\\x9b2J\n"


def test_a_hostile_piece_is_harmless_where_colours_show(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    runs = fake_dialogue(piece_of(" one", 2), piece_of(" \x1btwo"), piece_of(" three", 3, "eos"))
    Chat(runs).answer("Hello.")
    out, err = capsys.readouterr()
    first, second = ("\x1b[36m", "\x1b[35m")
    end = "\x1b[0m"
    assert out == f"{first}one{end}{second} \\x1btwo{end}{first} three{end}\n"
    assert err.startswith("\x1b[2m[recycling: 6 tokens")
    assert "3 steps, MAT 2.00]" in err


def test_ctrl_c_stops_an_answer_after_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = [piece_of("one"), piece_of(" two"), piece_of(" three", reason="eos")]
    presses = iter([False, True, False])

    def press() -> None:
        if next(presses):
            signal.raise_signal(signal.SIGINT)

    assert Chat(fake_dialogue(*pieces, on_piece=press)).answer("Hello.") == "stopped"
    out, err = capsys.readouterr()
    assert out == "one two\n"
    assert figures_of(err)[0][1:] == (2, 2, 1.0, ", stopped")


def test_ctrl_c_twice_within_a_step_stops_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    def press() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    stopped = Chat(fake_dialogue(piece_of("one"), on_piece=press))
    assert stopped.one_answer("Hello.") == 130
    out, err = capsys.readouterr()
    assert out == "" and "stopped before the first token" in err


@pytest.mark.parametrize("error", [ValueError, ArithmeticError, RuntimeError])
def test_an_answer_that_fails_is_one_line(
    error: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error("what\nhappened")

    assert Chat(fake_dialogue(piece_of("one"), on_piece=fail)).one_answer("Hello.") == 1
    assert capsys.readouterr() == ("", "error: what\n")


def test_a_full_context_does_not_end_the_chat(
    typed: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("sea " * 5000, "Hello.", "/exit")
    assert chat.run(list(SHORT)) == 0
    out, err = capsys.readouterr()
    assert re.search(r"error: prompt: got \d+ tokens; allowed: fewer than the model's context", err)
    assert len(figures_of(err)) == 1 and out
