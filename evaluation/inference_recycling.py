"""Answer questions with recycling: python -m evaluation.inference_recycling --help."""

from evaluation.answering.command import inference_command

if __name__ == "__main__":
    inference_command("recycling")
