r"""Train the small demo model that ships with the repository.

Trains a byte-level BPE tokenizer and a Llama-architecture model of about 7M parameters on a
JSONL(.gz) corpus of ``prompt`` and ``response``, and writes a folder that plain
``AutoModelForCausalLM`` and ``AutoTokenizer`` load: a trained model inside the repository gives real
text with real acceptance lengths at once, where there is no model hub.

Muon for the matrices and AdamW for the rest, bf16 autocast, chats packed whole, prompt tokens
weighted below answer tokens and the end of an answer above them, learning rate constant and then
as one minus a square root, and last a phase against loops (``scripts.demo_model.antiloop``). Kill it
at any time: the same command goes on from the last checkpoint.

Example:
    python -m scripts.demo_model --corpus corpus.jsonl.gz --out data/demo/model
    python -m scripts.demo_model --corpus corpus.jsonl.gz --out tiny --work tiny.work \
        --tokens 200000 --layers 2 --hidden 64 --intermediate 128 --vocab-size 1024 --no-compile

    # The draft model of the demo model, from the demo model's own answers (scripts.demo_model.answers):
    python -m scripts.demo_model --corpus answers.jsonl --out data/demo/draft \
        --tokenizer data/demo/model --layers 2 --hidden 128 --heads 2 --intermediate 352 \
        --tokens 12000000 --rounds 0

    # A small model with recurrent states, for transformers 5:
    python -m scripts.demo_model --corpus corpus.jsonl.gz --out data/demo/hybrid-model --recurrent \
        --tokenizer data/demo/model --layers 4 --hidden 192 --heads 3 --intermediate 528 \
        --minutes 40 --rounds 0
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from evaluation.answers.progress import progress
from model.commands.command_line import OptionParser, user_errors
from model.commands.files import write_whole
from scripts.demo_model.antiloop import AntiLoopConfig, unlearn_loops
from scripts.demo_model.corpus import (
    CorpusConfig,
    Row,
    Split,
    encode_turns,
    read_rows,
    split_rows,
    train_tokenizer,
)
from scripts.demo_model.recipe import CONTEXT, TrainConfig
from scripts.demo_model.training import LOG, Trainer, append_line

# Fields of `TrainConfig` that are options.
SIZES = ("vocab_size", "hidden", "layers", "heads", "intermediate", "seed")
MINUTES = 50.0  # of the main phase, where neither --minutes nor --tokens is given
LOG_STEPS = 20  # between two lines of the log


def export(trainer: Trainer, out: Path) -> None:
    """Write the model folder in bf16, file by file, each in one move.

    Files are moved one by one because a folder cannot be replaced in one step; only weights and log
    change between two exports of one run.
    """
    temporary = out.with_name(out.name + ".tmp")
    temporary.mkdir(parents=True, exist_ok=True)
    copy = type(trainer.model)(trainer.model.config)
    copy.load_state_dict(trainer.model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(temporary)
    trainer.tokenizer.save_pretrained(temporary)
    # transformers 4 knows the class and the rotary base under these names only.
    set_keys(temporary / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    if isinstance(copy, LlamaForCausalLM):
        set_keys(temporary / "config.json", rope_theta=10000.0)
    ids = {
        key: getattr(copy.config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    write_whole(temporary / "generation_config.json", json.dumps(ids, indent=2) + "\n")
    if (trainer.work / LOG).exists():
        shutil.copy(trainer.work / LOG, temporary / LOG)
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(temporary.iterdir()):
        path.chmod(0o644)
        os.replace(path, out / path.name)
    temporary.rmdir()


def set_keys(path: Path, **values: object) -> None:
    """Set keys of a JSON file."""
    item = json.loads(path.read_text(encoding="utf-8")) | values
    write_whole(path, json.dumps(item, indent=2) + "\n")


def train(trainer: Trainer, out: Path, eval_steps: int, save_minutes: float) -> None:
    """Run the main phase to the end of its budget.

    Args:
        trainer: goes on from where it stands.
        out: folder of the model, written with each checkpoint.
        eval_steps: steps between two held-out losses, a multiple of `LOG_STEPS`.
        save_minutes: minutes between two checkpoints.
    """
    bar = progress(total=100.0, unit="%", desc="training")
    recent: list[dict[str, float]] = []
    last_save = time.monotonic()
    stream = trainer.stream()
    while trainer.share < 1.0:
        recent.append(trainer.step(next(stream)))
        is_done = trainer.share >= 1.0
        step = trainer.progress.step
        if step % LOG_STEPS == 0 or is_done:
            entry = mean_figures(trainer, recent)
            recent = []
            if step % eval_steps == 0 or is_done:
                entry |= rounded(trainer.evaluate()._asdict(), prefix="held_out_")
            append_line(trainer.work / LOG, entry)
        if is_done or time.monotonic() - last_save > 60 * save_minutes:
            trainer.save()
            export(trainer, out)
            last_save = time.monotonic()
        bar.update(min(100.0, 100.0 * trainer.share) - bar.n)
    bar.close()


def mean_figures(trainer: Trainer, recent: Sequence[dict[str, float]]) -> dict[str, object]:
    """One line of the log: the figures averaged over the steps since the last one."""
    means = {key: sum(item[key] for item in recent) / len(recent) for key in recent[0]}
    progress = trainer.progress
    place = {"step": progress.step, "tokens": progress.tokens, "seconds": progress.seconds}
    return rounded(place) | rounded(means)


def rounded(figures: Mapping[str, float], prefix: str = "") -> dict[str, object]:
    """Figures with four digits after the point, which is what a plot can show."""
    return {prefix + key: round(value, 4) for key, value in figures.items()}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = OptionParser(prog="python -m scripts.demo_model", description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="JSONL(.gz): prompt, response")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--work", type=Path, help="checkpoint and log (default: OUT.work)")
    parser.add_argument(
        "--tokenizer", type=Path, help="folder of the tokenizer (default: train one)"
    )
    parser.add_argument(
        "--minutes", type=float, help=f"time of the main phase (default: {MINUTES:.0f})"
    )
    parser.add_argument("--tokens", type=int, help="tokens of the main phase, for --minutes")
    for name in SIZES:
        default = TrainConfig.__dataclass_fields__[name].default
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=default, help=f"(default: {default})")
    parser.add_argument(
        "--recurrent",
        action="store_true",
        help="three of four layers with a recurrent state, as in Qwen3.5 (transformers 5)",
    )
    rounds = AntiLoopConfig.__dataclass_fields__["rounds"].default
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"rounds against loops (default: {rounds})"
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--eval-every", type=int, default=200, help="steps (default: 200)")
    parser.add_argument("--save-minutes", type=float, default=3.0, help="(default: 3)")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile the loss; needs a C++ compiler on a CPU",
    )
    return parser.parse_args(argv)


def load_tokenizer(
    given: Path | None, work: Path, rows: Sequence[Row], vocab_size: int
) -> PreTrainedTokenizerFast:
    """Take the tokenizer that is given, or the one of an earlier start, or train it.

    Raises:
        ValueError: The given one has another number of tokens.
    """
    if given is not None:
        if not given.is_dir():
            raise ValueError(f"tokenizer: got {given}, allowed a folder with a tokenizer")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(given)
        if len(tokenizer) != vocab_size:
            raise ValueError(
                f"tokenizer: got {len(tokenizer)} tokens, allowed --vocab-size ({vocab_size})"
            )
        return tokenizer
    folder = work / "tokenizer"
    if (folder / "tokenizer.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = train_tokenizer(rows, vocab_size, CONTEXT)
    tokenizer.save_pretrained(folder)
    return tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = parse_arguments(argv)
    with user_errors(OSError):
        sizes = {name: getattr(options, name) for name in SIZES}
        if options.minutes is None and options.tokens is None:
            options.minutes = MINUTES
        config = TrainConfig(
            minutes=options.minutes,
            tokens=options.tokens,
            is_recurrent=options.recurrent,
            **sizes,
        )
        if options.eval_every % LOG_STEPS:
            raise ValueError(
                f"eval_steps: got {options.eval_every}, allowed multiples of {LOG_STEPS}"
            )
        anti_loop = AntiLoopConfig(rounds=options.rounds)
        rows = split_rows(read_rows(options.corpus))
        work = options.work or options.out.with_name(options.out.name + ".work")
        work.mkdir(parents=True, exist_ok=True)
        tokenizer = load_tokenizer(options.tokenizer, work, rows.train, config.vocab_size)
    if options.threads:
        torch.set_num_threads(options.threads)
    corpus = CorpusConfig(long_length=CONTEXT, long_share=0.02)
    turns = Split(
        encode_turns(rows.train, tokenizer, corpus), encode_turns(rows.held_out, tokenizer, corpus)
    )
    device = torch.device(options.device)
    trainer = Trainer(config, corpus, tokenizer, turns, work, device, options.compile)
    train(trainer, options.out, options.eval_every, options.save_minutes)
    unlearn_loops(trainer, anti_loop)
    export(trainer, options.out)
    return 0
