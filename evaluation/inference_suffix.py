"""Answer questions with suffix: python -m evaluation.inference_suffix --help."""

from evaluation.answering.command import inference_command

if __name__ == "__main__":
    inference_command("suffix")
