"""Answer questions with lookahead: python -m evaluation.inference_lookahead --help."""

from evaluation.cli import inference_command

if __name__ == "__main__":
    inference_command("lookahead")
