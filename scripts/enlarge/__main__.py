"""The command `python -m scripts.enlarge`."""

from model.commands.command_line import run_command
from scripts.enlarge.command import main

if __name__ == "__main__":
    run_command(main)
