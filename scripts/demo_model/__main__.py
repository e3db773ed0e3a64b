r"""Train a small model as data/demo/model was trained: the recipe of the models in data/demo.

Trains a byte-level BPE tokenizer and a model on a JSONL(.gz) corpus of `prompt` and `response`, and writes
a folder that transformers loads. The shape is that of a config.json. What the committed weights had
beside, above all a phase against the model's own loops, is in docs/demo-model.md.

Examples:
    python -m scripts.demo_model --corpus corpus.jsonl.gz --out demo

    # A draft model, from the model's own answers (scripts.demo_model.answers):
    python -m scripts.demo_model --corpus answers.jsonl --out draft --tokenizer data/demo/model \
        --config data/demo/draft --tokens 12000000

    # A model with recurrent states, for transformers 5:
    python -m scripts.demo_model --corpus corpus.jsonl.gz --out hybrid-model \
        --tokenizer data/demo/model --config data/demo/hybrid-model --tokens 17800000
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
import transformers
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.optimization import get_wsd_schedule

from model.commands.command_line import OptionParser, UserError, run_command, user_errors
from model.commands.files import write_whole
from model.commands.model_options import DEFAULT_MODEL
from model.machine.timing import progress
from scripts.demo_model import corpus
from scripts.demo_model.corpus import TrainingText, pack_epoch

WARMUP_STEPS = 60
DECAY_SHARE = 0.4  # last share of the steps, in which the learning rate falls to zero


def optimizers_of(model: PreTrainedModel) -> list[Optimizer]:
    """Return Muon for the matrices inside layers, and AdamW for the rest."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed_tokens" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed_tokens" in name]
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95),
        torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def loss_of(model: PreTrainedModel, batch: Sequence[TrainingText]) -> torch.Tensor:
    """Return the weighted mean cross-entropy of a batch, a scalar in nats a token."""
    ids = pad_sequence([torch.tensor(text.token_ids) for text in batch], batch_first=True)
    weights = pad_sequence([torch.tensor(text.weights) for text in batch], batch_first=True)
    ids, weights = ids.to(model.device), weights[:, 1:].to(model.device)
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        logits = model(ids[:, :-1], use_cache=False).logits
    losses = F.cross_entropy(logits.float().mT, ids[:, 1:], reduction="none")
    return (losses * weights).sum() / weights.sum()


def train(
    model: PreTrainedModel,
    optimizers: list[Optimizer],
    batches: Iterator[list[TrainingText]],
    steps: int,
) -> list[float]:
    """Train; return the loss of each step, nats a token.

    At this batch size a constant learning rate ends in a plateau of noise; a decay by one minus the
    square root leaves it sooner than a straight line does (Hägele et al. 2024, arXiv 2405.18392).
    """
    times = (WARMUP_STEPS, int(DECAY_SHARE * steps), steps)
    schedules = [get_wsd_schedule(each, *times, decay_type="1-sqrt") for each in optimizers]
    losses = []
    for batch in progress(islice(batches, steps), total=steps, desc="training"):
        loss = loss_of(model, batch)
        loss.backward()
        for each in (*optimizers, *schedules):
            each.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = OptionParser(prog="python -m scripts.demo_model", description=__doc__)
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="JSONL(.gz): prompt, response")
    add("--out", type=Path, required=True, help="model folder to write; must hold no model")
    add("--config", default=DEFAULT_MODEL, help="folder whose config.json is the shape")
    add("--tokenizer", help="folder of the tokenizer (default: train one)")
    add("--tokens", type=int, default=25_000_000, help="to learn from (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--device", default="cpu", help="cpu or cuda (%(default)s)")
    args = parser.parse_args(argv)
    if (args.out / "config.json").exists():
        raise UserError(f"out: got {args.out}, which holds a model; give a new folder")
    with user_errors(OSError):
        rows = corpus.read_rows(args.corpus)
        learned = [row for row in rows if not corpus.is_held_out(row[0])]
        config = transformers.AutoConfig.from_pretrained(args.config)
        if args.tokenizer:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(args.tokenizer)
        else:
            tokenizer = corpus.train_tokenizer(learned, config.vocab_size)
        args.out.mkdir(parents=True, exist_ok=True)
    turns = corpus.encode_turns(learned, tokenizer)
    held_out = corpus.encode_turns([row for row in rows if corpus.is_held_out(row[0])], tokenizer)
    if not turns or not held_out:
        raise UserError("corpus: got no row to learn from, or none to hold out; give more rows")
    torch.manual_seed(args.seed)
    config.vocab_size = len(tokenizer)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to(args.device)
    bos = tokenizer.bos_token_id
    batches = chain.from_iterable(pack_epoch(turns, bos, args.seed + epoch) for epoch in count())
    optimizers = optimizers_of(model)
    train(model, optimizers, batches, max(1, args.tokens // corpus.TOKENS_PER_STEP))
    with torch.no_grad():
        losses = [loss_of(model, batch).item() for batch in pack_epoch(held_out, bos, seed=0)]
    model.to("cpu", torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    path = args.out / "tokenizer_config.json"
    settings = path.read_text(encoding="utf-8")
    # transformers 4 knows the class under this name alone.
    write_whole(path, settings.replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    print(f"{args.out}: held-out loss {fmean(losses):.3f} nats a token, weighted as in training")
    return 0


if __name__ == "__main__":
    run_command(main)
