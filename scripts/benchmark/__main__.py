"""The command `python -m scripts.benchmark`."""

from model.commands.command_line import run_command
from scripts.benchmark.command import main

if __name__ == "__main__":
    run_command(main)
