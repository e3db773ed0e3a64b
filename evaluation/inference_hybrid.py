"""Answer questions with the hybrid; see `python -m evaluation.inference_hybrid --help`."""

from evaluation.answering.command import inference_command

if __name__ == "__main__":
    inference_command("hybrid")
