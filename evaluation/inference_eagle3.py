"""Answer questions with eagle3: python -m evaluation.inference_eagle3 --help."""

from evaluation.answering.command import inference_command

if __name__ == "__main__":
    inference_command("eagle3")
