"""Run: python -m scripts.train_heads --help."""

from model.commands.command_line import run_command
from scripts.train_heads.command import main

if __name__ == "__main__":
    run_command(main)
