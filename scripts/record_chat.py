"""Record one answer of the chat in a terminal of its own, as an animated picture (SVG).

The tokens of one step share a colour, as in the terminal; so a run of one colour is what one forward pass
gave. The picture plays slower than the answer came, and says by how much; it stands still at the end.

Run:
    python -m scripts.record_chat --out docs/img/chat.svg -- --prompt "Tell me about the sea."
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import sys
import textwrap
import time
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from model.chat.terminal import DIM, RUN_COLOURS
from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.files import check_output, write_whole

COLUMNS = 64
# of the picture, in its own units
FONT, ADVANCE, LINE, MARGIN = 16, 9.6, 24, 20
PAINTED = re.compile(r"\x1b\[(\d+)m(.*?)\x1b\[0m", re.DOTALL)
# Text, background and the colours of steps, in light and in dark.
STYLE = """\
  text { font: 16px ui-monospace, Menlo, Consolas, monospace; white-space: pre; fill: #1f2328 }
  rect { fill: #f6f8fa } .c0 { fill: #0a6e8a } .c1 { fill: #a0209a } .dim { fill: #59636e }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } rect { fill: #0d1117 } .c0 { fill: #56d4dd } .c1 { fill: #ff9bfa } .dim { fill: #9198a1 }
  }
  .k { opacity: 0; animation: show 1ms forwards } @keyframes show { to { opacity: 1 } }
  @media (prefers-reduced-motion: reduce) { .k { animation: none; opacity: 1 } }
"""


class Piece(NamedTuple):
    """A piece of output: when it came in seconds, its SGR colour, its text."""

    seconds: float
    colour: int
    text: str


def recorded(command: Sequence[str]) -> list[Piece]:
    """Run a command in a pseudo-terminal; return what it painted.

    Raises:
        UserError: if it failed.
    """
    chunks: list[tuple[float, bytes]] = []

    def read(fd: int) -> bytes:
        data = os.read(fd, 4096)
        chunks.append((time.perf_counter(), data))
        return b"\0"  # passed on in its place, to nobody

    out = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        try:
            status = pty.spawn(list(command), read, lambda fd: b"")
        finally:
            os.dup2(out, 1)
            os.close(out)
    if os.waitstatus_to_exitcode(status):
        said = b"".join(data for _, data in chunks).decode(errors="replace").strip()
        raise UserError(f"chat: failed: {said.splitlines()[-1] if said else 'no output'}")
    return pieces_of(chunks)


def pieces_of(chunks: Sequence[tuple[float, bytes]]) -> list[Piece]:
    """Return the painted pieces of a terminal's output, which came in chunks; a piece came with its last byte."""
    text, ends = "", []
    for seconds, data in chunks:
        text += data.decode(errors="replace")
        ends.append((len(text), seconds))
    pieces = []
    for found in PAINTED.finditer(text.replace("\r\n", " \n")):
        seconds = next(when for end, when in ends if found.end() <= end)
        pieces.append(Piece(seconds, int(found[1]), found[2]))
    return pieces


def picture(question: str, pieces: Sequence[Piece], slower: float) -> str:
    """Return the SVG of a question, the answer's pieces, and the line of figures."""
    answer = [piece for piece in pieces if piece.colour in RUN_COLOURS]
    figures = [piece.text for piece in pieces if piece.colour == DIM][-1]
    lines = [f"&gt; {escape(line)}" for line in textwrap.wrap(question, COLUMNS - 2)]
    # Each character of the answer, with its piece; lines break where words do.
    owner = [index for index, piece in enumerate(answer) for _ in piece.text]
    text, place = "".join(piece.text for piece in answer), 0
    for paragraph in text.split("\n"):
        for line in textwrap.wrap(paragraph, COLUMNS, drop_whitespace=False) or [""]:
            lines.append(_painted(line, owner[place : place + len(line)], answer, slower))
            place += len(line)
        place += 1
    end = (answer[-1].seconds - answer[0].seconds) * slower + 1
    notes = [*textwrap.wrap(figures, COLUMNS), f"shown {slower:g} times slower"]
    lines += [
        f'<tspan class="k dim" style="animation-delay:{end:.2f}s">{escape(note)}</tspan>'
        for note in notes
    ]
    width, height = COLUMNS * ADVANCE + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    texts = "\n".join(
        f'<text x="{MARGIN}" y="{MARGIN + FONT + index * LINE}">{line}</text>'
        for index, line in enumerate(lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">\n'
        f"<title>A chat: the tokens of one step share a colour. {escape(figures)}</title>\n"
        f'<style>\n{STYLE}</style>\n<rect width="100%" height="100%" rx="10"/>\n{texts}\n</svg>\n'
    )


def _painted(line: str, owners: Sequence[int], answer: Sequence[Piece], slower: float) -> str:
    """Return a line with a span for each piece, which shows when its step was done."""
    spans = []
    for index in dict.fromkeys(owners):
        first, count = owners.index(index), owners.count(index)
        colour = RUN_COLOURS.index(answer[index].colour)
        delay = (answer[index].seconds - answer[0].seconds) * slower + 1
        part = escape(line[first : first + count])
        spans.append(
            f'<tspan class="k c{colour}" style="animation-delay:{delay:.2f}s">{part}</tspan>'
        )
    return "".join(spans)


def main(argv: Sequence[str] | None = None) -> int:
    """Record an answer and write the picture."""
    parser = OptionParser(prog="python -m scripts.record_chat", description=__doc__)
    parser.add_argument("--out", required=True, metavar="SVG", help="file to write")
    parser.add_argument(
        "--slower",
        type=float,
        default=10.0,
        metavar="X",
        help="times slower than it came (%(default)s)",
    )
    parser.add_argument(
        "chat", nargs="+", metavar="OPTION", help="after --: options of model.chat, with --prompt"
    )
    args = parser.parse_args(argv)
    if args.slower <= 0:
        raise UserError(f"slower: got {args.slower:g}; allowed: more than 0")
    if "--prompt" not in args.chat[:-1]:
        raise UserError(f"chat: got {shlex.join(args.chat)}; allowed: options with --prompt TEXT")
    check_output(args.out, "out")
    question = args.chat[args.chat.index("--prompt") + 1]
    pieces = recorded([sys.executable, "-m", "model.chat", *args.chat])
    write_whole(args.out, picture(question, pieces, args.slower))
    return 0


if __name__ == "__main__":
    run_command(main)
