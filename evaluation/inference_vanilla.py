"""Answer questions with vanilla: python -m evaluation.inference_vanilla --help."""

from evaluation.answering.command import inference_command

if __name__ == "__main__":
    inference_command("vanilla")
