"""Spec-Bench's commands: answer questions with a method, compare answers, print tables."""

from model.commands.command_line import hide_interrupts

hide_interrupts(__name__)
