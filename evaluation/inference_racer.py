"""Answer questions with racer: python -m evaluation.inference_racer --help."""

from evaluation.answering.command import inference_command

if __name__ == "__main__":
    inference_command("racer")
