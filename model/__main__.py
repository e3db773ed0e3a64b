"""The command `token-recycling`, in a checkout `python -m model`: opens a room of the library by its name."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NoReturn

ROOMS = {"chat": "talk to a model in the terminal", "serve": "serve a model to OpenAI's clients"}


def main() -> NoReturn:
    """Run the command of the room named first; the other words are its own."""
    name, *words = sys.argv[1:] or [""]
    if name in ROOMS:
        sys.argv[1:] = words
        import_module(f".{name}.command", __package__).main()
    if name in ("-h", "--help"):
        print("usage: token-recycling ROOM [options]; ROOM --help lists the options of a room")
        print("\n".join(f"  {room:6} {text}" for room, text in ROOMS.items()))
        sys.exit(0)
    print(f"error: room: got {name!r}; allowed: {', '.join(ROOMS)}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
