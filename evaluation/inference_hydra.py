"""Answer questions with hydra: python -m evaluation.inference_hydra --help."""

from evaluation.answering.command import inference_command

if __name__ == "__main__":
    inference_command("hydra")
