"""Spec-Bench's name for inference_vanilla: python -m evaluation.inference_baseline --help."""

from evaluation.answering.command import inference_command

if __name__ == "__main__":
    inference_command("vanilla")
