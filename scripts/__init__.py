"""Commands run as `python -m scripts.<name>` from the repository root."""

from model.commands.command_line import hide_interrupts

hide_interrupts(__name__)
