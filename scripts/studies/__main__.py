"""The command `python -m scripts.studies`."""

from model.commands.command_line import run_command
from scripts.studies.command import main

if __name__ == "__main__":
    run_command(main)
