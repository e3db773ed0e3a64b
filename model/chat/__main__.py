"""The command `python -m model.chat`."""

from ..commands.command_line import run_command
from .command import run

if __name__ == "__main__":
    run_command(run)
