"""Answer questions with eagle2: python -m evaluation.inference_eagle2 --help."""

from evaluation.answering.command import inference_command

if __name__ == "__main__":
    inference_command("eagle2")
