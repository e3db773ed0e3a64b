"""The command `python -m scripts.replay`."""

from model.commands.command_line import run_command
from scripts.replay.command import main

if __name__ == "__main__":
    run_command(main)
