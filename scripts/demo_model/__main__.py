"""The command `python -m scripts.demo_model`."""

from model.commands.command_line import run_command
from scripts.demo_model.command import main

if __name__ == "__main__":
    run_command(main)
