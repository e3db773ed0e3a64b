"""Spec-Bench's commands: answer questions with a method, compare answers, print tables."""
