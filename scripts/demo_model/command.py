r"""Train a small model as data/demo/model was trained: the recipe of the models in data/demo.

Trains a byte-level BPE tokenizer and a Llama-architecture model on a JSONL(.gz) corpus of `prompt`
and `response`, and writes a folder that transformers loads. The main phase (`scripts.demo_model.training`)
is followed by one against loops (`scripts.demo_model.antiloop`). What the committed weights had beside
is on their cards.

Examples:
    python -m scripts.demo_model --corpus corpus.jsonl.gz --out demo

    # A draft model, from the model's own answers (scripts.demo_model.answers):
    python -m scripts.demo_model --corpus answers.jsonl --out draft --tokenizer data/demo/model \
        --layers 2 --hidden 128 --heads 2 --intermediate 352 --tokens 12000000 --rounds 0

    # A model with recurrent states, for transformers 5:
    python -m scripts.demo_model --corpus corpus.jsonl.gz --out hybrid-model --recurrent \
        --tokenizer data/demo/model --layers 4 --hidden 192 --heads 3 --intermediate 528 \
        --tokens 17800000 --rounds 0
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch
import transformers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from model.commands.command_line import OptionParser, UserError, user_errors
from model.commands.files import write_whole
from scripts.demo_model.antiloop import AntiLoopConfig, unlearn_loops
from scripts.demo_model.corpus import encode_turns, is_held_out, read_rows, train_tokenizer
from scripts.demo_model.training import CONTEXT, CORPUS, TrainConfig, Trainer

LOG = "train_log.jsonl"
# Fields of `TrainConfig` that are options with a number.
NUMBERS = ("vocab_size", "hidden", "layers", "heads", "intermediate", "tokens", "seed")


def build_parser() -> OptionParser:
    """Return the command's parser."""
    parser = OptionParser(prog="python -m scripts.demo_model", description=__doc__)
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="JSONL(.gz): prompt, response")
    add("--out", type=Path, required=True, help="model folder to write; must hold no model")
    add("--tokenizer", type=Path, help="folder of the tokenizer (default: train one)")
    defaults = {item.name: item.default for item in fields(TrainConfig)}
    for name in NUMBERS:
        add(f"--{name.replace('_', '-')}", type=int, default=defaults[name], help="(%(default)s)")
    add("--recurrent", action="store_true", help="three of four layers with a recurrent state")
    rounds = AntiLoopConfig().rounds
    add("--rounds", type=int, default=rounds, help="rounds against loops (%(default)s)")
    add("--threads", type=int, help="CPU threads (default: torch's)")
    add("--device", default="cpu", help="cpu or cuda (%(default)s)")
    add("--no-compile", dest="compile", action="store_false", help="do not compile the loss")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    args = build_parser().parse_args(argv)
    if (args.out / "config.json").exists():
        raise UserError(f"out: got {args.out}, which holds a model; give a new folder")
    if args.tokenizer and not args.tokenizer.is_dir():
        raise UserError(f"tokenizer: got {args.tokenizer}; allowed: a folder with a tokenizer")
    if args.recurrent and not hasattr(transformers, "Qwen3_5TextConfig"):
        raise UserError(
            f"recurrent: got transformers {transformers.__version__}; allowed: versions with Qwen3.5"
        )
    with user_errors(OSError):
        rows = read_rows(args.corpus)
        args.out.mkdir(parents=True, exist_ok=True)
    learned = [row for row in rows if not is_held_out(row)]
    held_out = [row for row in rows if is_held_out(row)]
    if args.tokenizer:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.tokenizer)
        args.vocab_size = len(tokenizer)
    else:
        tokenizer = train_tokenizer(learned, args.vocab_size, CONTEXT)
    if args.threads:
        torch.set_num_threads(args.threads)
    log = args.out / LOG
    log.unlink(missing_ok=True)
    numbers = {name: getattr(args, name) for name in NUMBERS}
    trainer = Trainer(
        TrainConfig(**numbers, is_recurrent=args.recurrent),
        tokenizer,
        encode_turns(learned, tokenizer, CORPUS),
        encode_turns(held_out, tokenizer, CORPUS),
        log,
        torch.device(args.device),
        args.compile,
    )
    trainer.train()
    unlearn_loops(trainer, AntiLoopConfig(rounds=args.rounds))
    export(trainer, args.out)
    return 0


def export(trainer: Trainer, out: Path) -> None:
    """Write model and tokenizer, in bf16."""
    model = trainer.model.to("cpu", torch.bfloat16)
    model.save_pretrained(out)
    trainer.tokenizer.save_pretrained(out)
    # transformers 4 knows the class and the rotary base under these names only.
    _set_keys(out / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    if isinstance(model, LlamaForCausalLM):
        _set_keys(out / "config.json", rope_theta=10000.0)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: getattr(model.config, name) for name in names}
    write_whole(out / "generation_config.json", json.dumps(ids, indent=2) + "\n")


def _set_keys(path: Path, **values: object) -> None:
    item = json.loads(path.read_text(encoding="utf-8")) | values
    write_whole(path, json.dumps(item, indent=2) + "\n")
