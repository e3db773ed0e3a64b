"""The command `token-recycling`, in a checkout `python -m model`: opens a command of the library by its name."""

from __future__ import annotations

import sys
from pathlib import Path
from pkgutil import resolve_name
from runpy import run_module
from typing import NoReturn

from . import __version__
from .commands.command_line import CHECKOUT, UserError, run_command
from .options import unknown_name

NAME = "token-recycling"
# Function of each command, a module of the harness for its one, and what it does.
COMMANDS = {
    "chat": (".chat.__main__:run", "talk to a model in the terminal, or have one message answered"),
    "generate": (".generate:run", "continue a text as it is given"),
    "serve": (".serve.__main__:run", "serve a model to OpenAI's clients"),
    "compare": ("evaluation.compare", "measure methods in turn on questions (in a checkout)"),
    "build": (".build:run", "build all C++ ahead, as for a container image"),
    "doctor": (".doctor:run", "say what is on this machine, what will be used, and what to do"),
}
USAGE = "\n".join(
    [
        f"usage: {NAME} COMMAND [options]; COMMAND --help lists the options of a command",
        *(f"  {name:9} {text}" for name, (_, text) in COMMANDS.items()),
    ]
)


def main() -> NoReturn:
    """Run the command named first; the other words are its own."""
    name, *words = sys.argv[1:] or [""]
    if name in ("-h", "--help"):
        print(USAGE)
        sys.exit(0)
    if name == "--version":
        print(NAME, __version__)
        sys.exit(0)
    sys.argv[1:] = words
    run_command(lambda _: _run(name))


def _run(name: str) -> int:
    """Run a command; one of the harness as a program, from the checkout that this file lies in.

    That imports the library as `model`: another package than this one, if this is installed in place. It is in no
    wheel: its packages are called `evaluation` and `scripts`, names not ours alone.
    """
    if name not in COMMANDS:
        raise UserError(unknown_name("command", name, list(COMMANDS)))
    place, _ = COMMANDS[name]
    if place.startswith("."):
        code: int = resolve_name(f"{__package__}{place}")(None)
        return code
    if Path(__file__).parent.name != "model":
        raise UserError(
            "compare: is in a checkout of the project, not in the installed package; there: "
            f"pip install -e '.[harness]', then this command or python -m {place}"
        )
    sys.path.insert(0, str(CHECKOUT))
    run_module(place, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    main()
