r"""Write a model's own greedy answers to the prompts of a corpus, as a corpus.

Rows whose answer does not end are left out. A draft model is asked what its target would say, not
what the corpus says, so that it learns from its target's answers (sequence-level distillation, Kim
and Rush 2016, arXiv 1606.07947).

Example:
    python -m scripts.demo_model.answers --model-path data/demo/model --corpus corpus.jsonl.gz \
        --num-prompts 16000 --out answers.jsonl
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from model.commands.command_line import (
    OptionParser,
    add_options,
    config_of,
    run_command,
    user_errors,
)
from model.commands.files import check_output, write_whole
from model.commands.loading import check_model, load_decoder
from model.commands.model_options import DEFAULT_MODEL, ModelOptions
from scripts.demo_model.corpus import read_rows

BATCH_SIZE = 64


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = OptionParser(prog="python -m scripts.demo_model.answers", description=__doc__)
    add = parser.add_argument
    add("--model-path", "--model", default=DEFAULT_MODEL, help="folder or hub name (demo model)")
    add("--corpus", type=Path, required=True, help="JSONL(.gz): prompt, response")
    add("--out", type=Path, required=True, help="JSONL to write")
    add("--num-prompts", type=int, help="of the corpus, drawn at random (default: all)")
    add("--max-new-tokens", type=int, default=128, help="(default: 128)")
    add_options(parser, ModelOptions, ("dtype", "device", "threads"))
    args = parser.parse_args(argv)
    check_output(args.out, "out")
    options = config_of(ModelOptions, vars(args))
    with user_errors(OSError):
        prompts = sorted({prompt for prompt, _ in read_rows(args.corpus)})
    if args.num_prompts is not None:
        prompts = random.Random(0).sample(prompts, min(args.num_prompts, len(prompts)))
    prompts.sort(key=len)  # equal lengths side by side
    checked = check_model(options)
    decoder = load_decoder(options, checked, None, {})
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    outputs = decoder.generate_all(
        chats, batch_size=BATCH_SIZE, max_new_tokens=args.max_new_tokens, show_progress=True
    )
    lines = []
    for prompt, output in zip(prompts, outputs, strict=True):
        response = output.text.strip()
        if response and output.stop_reason == "eos":
            lines.append(json.dumps({"prompt": prompt, "response": response}) + "\n")
    write_whole(args.out, "".join(lines))
    return 0


if __name__ == "__main__":
    run_command(main)
