"""Answer questions with goose: python -m evaluation.inference_goose --help."""

from evaluation.answering.command import inference_command

if __name__ == "__main__":
    inference_command("goose")
