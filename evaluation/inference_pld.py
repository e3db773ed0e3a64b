"""Answer questions with pld: python -m evaluation.inference_pld --help."""

from evaluation.answering.command import inference_command

if __name__ == "__main__":
    inference_command("pld")
