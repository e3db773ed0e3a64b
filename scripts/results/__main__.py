"""The command `python -m scripts.results`."""

from model.commands.command_line import run_command
from scripts.results.command import main

if __name__ == "__main__":
    run_command(main)
