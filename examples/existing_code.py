"""Speed up code that calls transformers' `generate`: one line, the same tokens.

Run:
    python examples/existing_code.py [MODEL]
"""

import sys
from pathlib import Path

import torch
from token_recycling import accelerate
from transformers import AutoModelForCausalLM, AutoTokenizer

DEMO_MODEL = Path(__file__).parents[1] / "data/demo/model"


def answer(model, tokenizer, question):
    """Stand for the code that exists: it knows nothing of drafts."""
    ids = tokenizer(f"USER: {question} ASSISTANT:", return_tensors="pt").input_ids
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60)[0]


def main(model_path=DEMO_MODEL):
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    plain = answer(model, tokenizer, "Tell me about the sea.")

    accelerate(model, tokenizer)  # `restore(model)` undoes it

    drafted = answer(model, tokenizer, "Tell me about the sea.")
    print(tokenizer.decode(drafted, skip_special_tokens=True))
    print("equal to generate:", torch.equal(plain, drafted))
    print("tokens of each step:", model.generate.accept_lengths)


if __name__ == "__main__":
    main(*sys.argv[1:])
