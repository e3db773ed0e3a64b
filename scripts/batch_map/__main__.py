"""The command `python -m scripts.batch_map`."""

from model.commands.command_line import run_command
from scripts.batch_map.command import main

if __name__ == "__main__":
    run_command(main)
