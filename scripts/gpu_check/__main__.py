"""The command `python -m scripts.gpu_check`."""

from model.commands.command_line import run_command
from scripts.gpu_check.command import main

if __name__ == "__main__":
    run_command(main)
