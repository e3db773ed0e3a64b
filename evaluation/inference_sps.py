"""Answer questions with sps: python -m evaluation.inference_sps --help."""

from evaluation.answering.command import inference_command

if __name__ == "__main__":
    inference_command("sps")
