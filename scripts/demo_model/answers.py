r"""Write a model's own greedy answers to the prompts of a corpus, as a corpus.

The model answers every prompt of a JSONL(.gz) corpus, by transformers' `generate` in batches of
prompts of about the same length. Rows whose answer does not end are left out. A draft model is asked
what its target would say, not what the corpus says, so that it learns from its target's answers
(sequence-level distillation, Kim and Rush 2016, arXiv 1606.07947). Kill it at any time: the same
command goes on where it stopped.

Example:
    python -m scripts.demo_model.answers --model-path data/demo/model --corpus corpus.jsonl.gz \
        --num-prompts 16000 --out answers.jsonl
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from evaluation.answers.progress import progress
from model.commands.command_line import OptionParser, run_command, user_errors
from model.commands.files import check_output, write_whole
from model.commands.loading import check_model, load_target
from model.commands.model_options import DEFAULT_MODEL, ModelOptions
from model.commands.options import add_options, config_of
from scripts.demo_model.corpus import read_rows

BATCH_SIZE = 64


@torch.no_grad()
def continued(
    model: Any,
    texts: Sequence[list[int]],
    pad: int,
    eos: int,
    batch_size: int,
    **options: object,
) -> Iterator[list[int]]:
    """Yield the tokens after each text, up to an eos (included); `options` are those of `generate`."""
    for start in range(0, len(texts), batch_size):
        group = texts[start : start + batch_size]
        width = max(map(len, group))
        token_ids = torch.tensor([[pad] * (width - len(text)) + text for text in group])
        mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in group])
        output = model.generate(
            token_ids.to(model.device),
            attention_mask=mask.to(model.device),
            pad_token_id=pad,
            **options,
        )
        for row in output[:, width:].tolist():
            yield row[: row.index(eos) + 1] if eos in row else row


def write_answers(
    model: Any, tokenizer: Any, prompts: list[str], out: Path, max_new_tokens: int
) -> None:
    """Write the answers to the prompts.

    Until the last is answered they stand in OUT.part, a line for every prompt in turn, null where an
    answer did not end.
    """
    part = out.with_name(out.name + ".part")
    text = part.read_text(encoding="utf-8") if part.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines(keepends=True)  # a cut line is answered again
    part.write_text("".join(lines), encoding="utf-8")
    left = prompts[len(lines) :]
    ids = [_prompt_ids(tokenizer, prompt) for prompt in left]
    eos = tokenizer.eos_token_id
    pad = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    rows = continued(
        model, ids, pad, eos, BATCH_SIZE, max_new_tokens=max_new_tokens, do_sample=False
    )
    with part.open("a", encoding="utf-8", buffering=1) as file:
        for prompt, row in zip(left, progress(rows, total=len(left)), strict=True):
            answer = tokenizer.decode(row, skip_special_tokens=True).strip()
            item = {"prompt": prompt, "response": answer if row[-1] == eos else None}
            lines.append(json.dumps(item) + "\n")
            file.write(lines[-1])
    write_whole(out, "".join(line for line in lines if json.loads(line)["response"]))
    part.unlink()


def _prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    chat = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = OptionParser(prog="python -m scripts.demo_model.answers", description=__doc__)
    parser.add_argument(
        "--model-path", "--model", default=DEFAULT_MODEL, help="folder or hub name (the demo model)"
    )
    parser.add_argument("--corpus", type=Path, required=True, help="JSONL(.gz): prompt, response")
    parser.add_argument("--out", type=Path, required=True, help="JSONL to write")
    parser.add_argument(
        "--num-prompts", type=int, help="of the corpus, drawn at random (default: all)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="(default: 128)")
    add_options(parser, ModelOptions, ("dtype", "device", "threads"))
    args = parser.parse_args(argv)
    check_output(args.out, "out")
    options = config_of(ModelOptions, vars(args))
    with user_errors(OSError):
        prompts = sorted({row.prompt for row in read_rows(args.corpus)})
    if args.num_prompts is not None:
        prompts = random.Random(0).sample(prompts, min(args.num_prompts, len(prompts)))
    # Equal lengths side by side: little padding.
    prompts.sort(key=lambda text: (len(text), text))
    checked = check_model(options)
    model = load_target(options, checked).model
    write_answers(model, checked.tokenizer, prompts, args.out, args.max_new_tokens)
    return 0


if __name__ == "__main__":
    run_command(main)
