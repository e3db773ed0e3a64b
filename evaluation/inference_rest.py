"""Answer questions with rest: python -m evaluation.inference_rest --help."""

from evaluation.answering.command import inference_command

if __name__ == "__main__":
    inference_command("rest")
