"""Answer questions with logitspec: python -m evaluation.inference_logitspec --help."""

from evaluation.answering.command import inference_command

if __name__ == "__main__":
    inference_command("logitspec")
