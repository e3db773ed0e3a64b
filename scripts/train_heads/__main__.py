r"""Train heads that draft for a model. The model does not change.

Text: JSON lines with `prompt` and `response` (responses alone are learned) or `text`, or plain text,
.gz or not. The model's own greedy answers (`scripts.demo_model.answers`) are best, because heads guess
what the model will say. You can stop the command at any time: run again, it goes on where it stopped.

Example:
    python -m scripts.train_heads --method medusa --model-path data/demo/model --text answers.jsonl \
        --minutes 25 --out heads
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from model.api.loading.weights import read_weights
from model.commands.command_line import (
    OptionParser,
    UserError,
    add_options,
    config_of,
    run_command,
    user_errors,
)
from model.commands.files import write_whole
from model.commands.loading import check_model
from model.commands.model_options import DEFAULT_MODEL, ModelOptions
from model.options import unknown_name
from scripts.train_heads.block import BlockTrainer
from scripts.train_heads.data import read_documents
from scripts.train_heads.eagle import Eagle3Trainer, EagleTrainer
from scripts.train_heads.heads import HeadTrainer, HydraTrainer, MedusaTrainer
from scripts.train_heads.training import LOG, Run

TRAINERS: dict[str, type[HeadTrainer]] = {
    "medusa": MedusaTrainer,
    "hydra": HydraTrainer,
    "eagle": EagleTrainer,
    "eagle3": Eagle3Trainer,
    "dflash": BlockTrainer,
}
# Must be the same when a training goes on.
SETTINGS = (
    *("method", "model_path", "text", "minutes", "learning_rate", "batch_tokens", "max_length"),
    "seed",
)
# Options of some trainers alone.
OWN_OPTIONS = ("num_heads", "num_layers", "own_outputs", "draft_vocab")


def main(argv: Sequence[str] | None = None) -> int:
    parser = OptionParser(prog="python -m scripts.train_heads", description=__doc__)
    add = parser.add_argument
    add("--method", required=True, help=f"one of {', '.join(TRAINERS)}")
    add("--model-path", default=DEFAULT_MODEL, help="folder or hub name (the demo model)")
    add("--text", nargs="+", required=True, metavar="FILE", type=Path, help="what is learned from")
    add("--out", type=Path, required=True, metavar="FOLDER", help="checkpoint to write")
    add("--work", type=Path, metavar="FOLDER", help="state and log (default: OUT.work)")
    add("--num-heads", type=int, help="of medusa (4)")
    add("--num-layers", type=int, help="of medusa: residual blocks of a head (1); of dflash (2)")
    add(
        "--own-outputs",
        action=argparse.BooleanOptionalAction,
        help="of medusa: an output layer for every head, as published; else the model's serves all (on)",
    )
    add("--draft-vocab", type=int, help="of eagle3: tokens that can be drafted (32000)")
    add("--minutes", type=float, default=25.0, help="of all starts together (%(default)s)")
    add("--learning-rate", type=float, default=1e-3, help="the highest (%(default)s)")
    add("--batch-tokens", type=int, default=4096, help="of a step (%(default)s)")
    add("--max-length", type=int, default=1024, help="tokens of a document (%(default)s)")
    add("--save-minutes", type=float, default=2.0, help="between saved states (%(default)s)")
    add("--seed", type=int, default=0, help="of the order of documents (%(default)s)")
    add("--dtype", default="auto", help="of the frozen model (float32 on a CPU)")
    add_options(parser, ModelOptions, ("device", "threads", "allow_pickle"))
    args = parser.parse_args(argv)
    if args.method not in TRAINERS:
        raise UserError(unknown_name("method", args.method, list(TRAINERS)))
    make = TRAINERS[args.method]
    _complete(args, make)
    for name in (*make.options, "minutes", "learning_rate", "batch_tokens"):
        value = getattr(args, name)
        if not isinstance(value, bool) and not value > 0:
            raise UserError(f"{name}: got {value}; allowed: above 0")
    if args.max_length < 16:
        raise UserError(f"max_length: got {args.max_length}; allowed: 16 or more")
    options = config_of(ModelOptions, vars(args))
    checked = check_model(options)
    documents = read_documents(args.text, checked.tokenizer, args.max_length)
    with user_errors(OSError):
        model = read_weights(args.model_path, config=checked.hf_config, dtype=checked.dtype)
        work = args.work or args.out.with_name(args.out.name + ".work")
        work.mkdir(parents=True, exist_ok=True)
    model = model.eval().to(checked.device).requires_grad_(False)
    torch.manual_seed(args.seed)
    trainer = make(model, args)
    trainer.prepare(documents)
    trainer.module.to(checked.device)
    settings = {name: getattr(args, name) for name in (*SETTINGS, *make.options)}
    settings["text"] = list(map(str, args.text))
    run = Run(trainer, model, documents, args, work, settings)
    run.train()
    trainer.save(args.out)
    if (work / LOG).is_file():  # not after a handful of steps
        write_whole(args.out / LOG, (work / LOG).read_text(encoding="utf-8"))
    done = run.place
    print(f"{args.out}: {done.step} steps, {done.tokens} tokens, {done.seconds / 60:.1f} minutes")
    return 0


def _complete(args: argparse.Namespace, make: type[HeadTrainer]) -> None:
    """Give the trainer's own options their defaults; refuse those of other trainers."""
    for name in OWN_OPTIONS:
        value = getattr(args, name)
        if value is not None and name not in make.options:
            known = ", ".join(make.options) or "none of its own"
            raise UserError(f"{name}: got {value}; allowed with {args.method}: {known}")
        if value is None and name in make.options:
            setattr(args, name, make.options[name])


if __name__ == "__main__":
    run_command(main)
