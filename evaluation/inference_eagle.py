"""Answer questions with eagle: python -m evaluation.inference_eagle --help."""

from evaluation.answering.command import inference_command

if __name__ == "__main__":
    inference_command("eagle")
