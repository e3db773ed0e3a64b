"""A chat in the terminal: answers stream in, and the tokens of one step share a colour.

Run:
    python -m model.chat
    python -m model.chat --prompt "Tell me about the sea."
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from ..commands.command_line import (
    Interrupt,
    OptionParser,
    UserError,
    add_options,
    check_text,
    command_of,
    config_of,
    first_line,
    printable,
    run_command,
    user_errors,
)
from ..commands.model_options import ModelOptions, SamplingOptions
from ..methods import BUILT_IN, find_method
from ..options import unknown_name

if TYPE_CHECKING:
    from .dialogue import Dialogue

COMMAND = command_of("chat")
COMMANDS = ("/reset", "/method", "/help", "/exit")
HELP = f"""\
/reset         forget the conversation; what the methods have learned stays
/method NAME   go on with another method: {", ".join(BUILT_IN)}, or one of another package
/help          show this
/exit          leave; so does Ctrl-D (exit code 0)
Ctrl-C         during an answer: stop it, and keep the text so far
               at the prompt, twice: leave (exit code 130)
"""
EXAMPLES = f"""\
examples:
  # talk to the demo model
  {COMMAND}

  # one answer: on stdout alone, all else on stderr
  {COMMAND} --prompt "Tell me about the sea." > answer.txt

  # what the matrix has learned about a token, from an answer or from a saved matrix
  {COMMAND} --prompt "Tell me about the sea." --show-matrix the
  {COMMAND} --load-matrix matrix.safetensors --show-matrix 278
"""
# The model options that the chat uses.
MODEL_OPTIONS = ("model_path", "dtype", "device", "threads")
# Options that make sense only if something is answered.
ANSWERING = ("save_matrix", "max_new_tokens", "temperature", "top_k", "top_p", "seed")
# Set Graphics Rendition codes (ECMA-48): two colours that differ well on light and dark backgrounds.
RUN_COLOURS = (36, 35)
DIM = 2
STOP_NOTES = {
    "stopped": ", stopped",
    "length": ", stopped at --max-new-tokens",
    "context": ", stopped where the model's context is full",
}


def run(argv: Sequence[str] | None = None) -> int:
    """Chat, answer one prompt, or show a saved matrix; return the exit code, or raise UserError."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a stray byte must not end the chat
    options = _parse(argv)
    from .dialogue import ChatSetup  # imported late: transformers takes seconds

    setup = ChatSetup(options)
    if options.show_matrix is not None and options.prompt is None:
        print(setup.matrix_report())
        return 0
    dialogue = setup.load()
    chat = Chat(dialogue)
    for note in setup.notices(dialogue):
        chat.note(note)
    code = chat.run() if options.prompt is None else chat.one_answer(options.prompt)
    if options.show_matrix is not None:
        print(setup.matrix_report(dialogue))
    setup.save(dialogue)
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; `model` and `sampling` are the configs made of them."""
    parser = OptionParser(
        prog=COMMAND,
        description=f"Chat with a model in the terminal.\n\nin the chat:\n{HELP}",
        epilog=EXAMPLES,
    )
    add_options(parser, ModelOptions, MODEL_OPTIONS)
    add_options(parser, SamplingOptions)
    parser.add_argument(
        "--method",
        metavar="NAME",
        help="the method to begin with, of those below or package.module:DrafterClass (default: what pays on "
        "the device, hybrid on a CPU and recycling on a GPU; with a matrix recycling)",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="answer this and leave")
    parser.add_argument(
        "--show-matrix",
        metavar="TOKEN",
        help="print what the matrix has learned about a token (a piece of text, or its id): after "
        "--prompt, or from --load-matrix alone",
    )
    parser.add_argument("--load-matrix", metavar="FILE", help="begin with a saved matrix")
    parser.add_argument("--save-matrix", metavar="FILE", help="save the matrix when leaving")
    options = parser.parse_args(argv)
    if options.show_matrix is not None and options.prompt is None:
        if not options.load_matrix:
            raise UserError("show_matrix: needs something learned; give --prompt or --load-matrix")
        unused = [name for name in ANSWERING if getattr(options, name, None) is not None]
        if unused:
            raise UserError(
                f"{unused[0]}: got it with --show-matrix and no prompt, where nothing is generated; give --prompt, "
                "or leave it out"
            )
    if options.prompt is not None:
        if not options.prompt.strip():
            raise UserError("prompt: got an empty text; allowed: a text, or no --prompt for a chat")
        check_text(options.prompt, "prompt")
    elif options.show_matrix is None and sys.stdin is None:
        raise UserError("prompt: got none, and standard input is closed; give --prompt")
    if options.method is not None:
        with user_errors():
            find_method(options.method)
    given = vars(options)
    options.model = config_of(ModelOptions, given)
    options.sampling = config_of(SamplingOptions, given)
    return options


class Chat:
    """The chat on this process's terminal: answers on stdout, all else on stderr."""

    def __init__(self, dialogue: Dialogue) -> None:
        self.dialogue = dialogue
        self._paint = painter(sys.stdout)
        self._paint_note = painter(sys.stderr)

    def run(self) -> int:
        """Read lines and answer them until the user leaves; return the exit code."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives `input` its line editing and history)
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if is_terminal:
            self.note(
                f"{self.dialogue.decoder.method}; tokens of one step share a colour; /help lists the commands"
            )
        num_interrupts = 0
        while num_interrupts < 2:
            try:
                line = input("> " if is_terminal else "").strip()
            except EOFError:
                line = "/exit"
                if is_terminal:
                    self.note("")
            except KeyboardInterrupt:
                num_interrupts += 1
                self.note("" if num_interrupts > 1 else "\nCtrl-C again leaves; /help")
                continue
            num_interrupts = 0
            if line == "/exit":
                return 0
            if line.startswith("/"):
                self._obey(line)
            elif line:
                self.answer(line)
        return 130

    def one_answer(self, text: str) -> int:
        """Answer one message; return the exit code."""
        return {"stopped": 130, "failed": 1}.get(self.answer(text), 0)

    def answer(self, text: str) -> str:
        """Stream the answer to a message to stdout, then its figures to stderr.

        Returns:
            Why it ended: as `StepRecord.stop_reason`, or "stopped" (Ctrl-C) or "failed".
        """
        lengths: list[int] = []
        shown = ""
        reason, failure = "stopped", ""
        started = time.perf_counter()
        try:
            with Interrupt() as interrupt, contextlib.closing(self.dialogue.answer(text)) as pieces:
                for piece in pieces:
                    # With some chat templates the answer begins with a space.
                    new = printable(piece.text if shown else piece.text.lstrip())
                    sys.stdout.write(self._paint(new, RUN_COLOURS[len(lengths) % 2]))
                    sys.stdout.flush()
                    shown += new
                    lengths.append(len(piece.token_ids))
                    reason = piece.record.stop_reason or reason
                    if interrupt.is_noted:
                        break
        except KeyboardInterrupt:
            pass  # second Ctrl-C within one step
        # A full context, NaN logits or a device out of memory must not end the chat.
        except (ValueError, ArithmeticError, RuntimeError) as error:
            reason, failure = "failed", first_line(error)
        seconds = time.perf_counter() - started
        if shown:
            print(flush=True)
        if lengths:
            num_tokens, num_steps = sum(lengths), len(lengths)
            self.note(
                f"[{self.dialogue.decoder.method}: {num_tokens} tokens in {seconds:.2f} s, "
                f"{num_tokens / seconds:.1f} tokens/s, {num_steps} steps, "
                f"MAT {num_tokens / num_steps:.2f}{STOP_NOTES.get(reason, '')}]"
            )
        elif reason == "stopped":
            self.note("stopped before the first token; the message is not kept")
        if failure:
            self.note(f"error: {failure}")
        return reason

    def note(self, text: str) -> None:
        print(self._paint_note(printable(text), DIM), file=sys.stderr, flush=True)

    def _obey(self, line: str) -> None:
        name, _, given = line.partition(" ")
        if name not in COMMANDS:
            self.note(f"error: {unknown_name('command', name, COMMANDS)}")
        elif given and name != "/method":
            self.note(f"error: {name}: got {given!r}; allowed: nothing after it")
        elif name == "/reset":
            self.dialogue.reset()
            self.note("the conversation is forgotten")
        elif name == "/help":
            self.note(HELP.rstrip())
        else:
            method = given.strip()
            try:
                self.dialogue.use(method)
            except ValueError as error:
                self.note(f"error: {first_line(error)}")
            else:
                self.note(f"{method} from here on; the conversation stays")


def painter(stream: TextIO) -> Callable[[str, int], str]:
    """Return a function that colours text (SGR code) for this stream, or leaves it if there are no colours.

    A terminal has them that is not dumb, if NO_COLOR is not set (https://no-color.org).
    """
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "") == "dumb"
    if is_plain or not stream.isatty():
        return lambda text, _: text
    return lambda text, colour: f"\x1b[{colour}m{text}\x1b[0m" if text else ""


if __name__ == "__main__":
    run_command(run)
