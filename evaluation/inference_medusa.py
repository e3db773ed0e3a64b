"""Answer questions with medusa: python -m evaluation.inference_medusa --help."""

from evaluation.answering.command import inference_command

if __name__ == "__main__":
    inference_command("medusa")
