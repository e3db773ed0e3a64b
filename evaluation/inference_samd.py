"""Answer questions with samd: python -m evaluation.inference_samd --help."""

from evaluation.answering.command import inference_command

if __name__ == "__main__":
    inference_command("samd")
