"""Decode 64 prompts, eight in each pass. A text that ends makes room for the next prompt.

Run:
    python examples/batch.py [MODEL]
"""

import sys
import time
from pathlib import Path

from token_recycling import SpeculativeDecoder

DEMO_MODEL = Path(__file__).parents[1] / "data/demo/model"
FORMS = ("Tell me about {}.", "Write about {}.", "What is {}?", "Why do people like {}?")
TOPICS = ("rain", "music", "a boat", "the sea", "bread", "winter", "a dog", "the moon")
TOPICS += ("gold", "trees", "a bridge", "time", "tea", "the sun", "a train", "snow")


def main(model_path=DEMO_MODEL, max_new_tokens=24):
    decoder = SpeculativeDecoder.from_pretrained(model_path)
    prompts = [f"USER: {form.format(topic)} ASSISTANT:" for form in FORMS for topic in TOPICS]
    start = time.perf_counter()
    outputs = list(decoder.generate_all(prompts, batch_size=8, max_new_tokens=max_new_tokens))
    seconds = time.perf_counter() - start

    for prompt, output in list(zip(prompts, outputs, strict=True))[:3]:
        print(f"{prompt}{output.text}\n")
    num_tokens = sum(len(output.token_ids) for output in outputs)
    num_steps = sum(len(output.accept_lengths) for output in outputs)
    print(f"{len(outputs)} texts, {num_tokens} tokens, {num_tokens / seconds:.0f} tokens/s")
    print(f"{num_tokens / num_steps:.2f} tokens a step of a text")


if __name__ == "__main__":
    main(*sys.argv[1:])
