r"""Write a model's own greedy answers to the prompts of a corpus, as a corpus.

The model answers every prompt of a JSONL(.gz) corpus, by plain Hugging Face ``generate`` in batches
of prompts of about the same length. Rows whose answer does not end are left out. A draft model is
asked what its target would say, not what the corpus says, so that it learns from its target's
answers (sequence-level distillation, Kim and Rush 2016, arXiv 1606.07947). Kill it at any time: the
same command goes on where it stopped.

Example:
    python -m scripts.demo_model.answers --model data/demo/model --corpus corpus.jsonl.gz \
        --num-prompts 16000 --out answers.jsonl
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from evaluation.answers.progress import progress
from model.commands.command_line import OptionParser, run_command, user_errors
from model.commands.files import check_output, write_whole
from scripts.demo_model.corpus import read_rows
from scripts.demo_model.report import DTYPES, Speaker

BATCH_SIZE = 64


def write_answers(speaker: Speaker, prompts: list[str], out: Path) -> None:
    """Write the answers to the prompts.

    Until the last is answered they stand in OUT.part, a line for every prompt in turn, null where an
    answer did not end.
    """
    part = out.with_name(out.name + ".part")
    text = part.read_text(encoding="utf-8") if part.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines(keepends=True)  # a cut line is answered again
    part.write_text("".join(lines), encoding="utf-8")
    eos = speaker.tokenizer.eos_token_id
    with part.open("a", encoding="utf-8") as file, progress(total=len(prompts)) as bar:
        bar.update(len(lines))
        for start in range(len(lines), len(prompts), speaker.batch):
            chosen = prompts[start : start + speaker.batch]
            ids = [speaker.prompt_ids([{"role": "user", "content": prompt}]) for prompt in chosen]
            for prompt, row in zip(chosen, speaker.generate(ids), strict=True):
                answer = speaker.tokenizer.decode(row, skip_special_tokens=True).strip()
                item = {"prompt": prompt, "response": answer if row[-1] == eos else None}
                lines.append(json.dumps(item) + "\n")
            file.writelines(lines[-len(chosen) :])
            file.flush()
            bar.update(len(chosen))
    ended = [line for line in lines if json.loads(line)["response"]]
    write_whole(out, "".join(ended))
    part.unlink()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = OptionParser(prog="python -m scripts.demo_model.answers", description=__doc__)
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--corpus", type=Path, required=True, help="JSONL(.gz): prompt, response")
    parser.add_argument("--out", type=Path, required=True, help="JSONL to write")
    parser.add_argument(
        "--num-prompts", type=int, help="of the corpus, drawn at random (default: all)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="(default: 128)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(default: float32)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    options = parser.parse_args(argv)
    check_output(options.out, "out")
    if options.threads:
        torch.set_num_threads(options.threads)
    with user_errors(OSError):
        rows = read_rows(options.corpus)
        speaker = Speaker(options.model, DTYPES[options.dtype], options.max_new_tokens, BATCH_SIZE)
    prompts = sorted({row.prompt for row in rows})
    if options.num_prompts is not None:
        prompts = random.Random(0).sample(prompts, min(options.num_prompts, len(prompts)))
    # Equal lengths side by side: little padding.
    write_answers(speaker, sorted(prompts, key=lambda text: (len(text), text)), options.out)
    return 0


if __name__ == "__main__":
    run_command(main)
