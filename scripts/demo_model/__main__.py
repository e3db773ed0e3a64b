r"""Train a small model as data/demo/model was trained: the recipe of the models in data/demo.

Trains a byte-level BPE tokenizer and a model on a JSONL(.gz) corpus of `prompt` and `response`, first on
the corpus and then against the model's own loops, and writes a folder that transformers loads. The
shape is that of a config.json. What the committed weights had beside is in docs/demo-model.md.

Examples:
    python -m scripts.demo_model --corpus corpus.jsonl.gz --out demo

    # A draft model, from the model's own answers (scripts.demo_model.answers):
    python -m scripts.demo_model --corpus answers.jsonl --out draft --tokenizer data/demo/model \
        --config data/demo/draft --tokens 12000000 --rounds 0

    # A model with recurrent states, for transformers 5:
    python -m scripts.demo_model --corpus corpus.jsonl.gz --out hybrid-model \
        --tokenizer data/demo/model --config data/demo/hybrid-model --tokens 17800000 --rounds 0
"""

from __future__ import annotations

import copy
import random
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
from scripts.demo_model.answers import continued
from scripts.demo_model.corpus import Text, Turn, find_loop, pack_epoch

WARMUP_STEPS = 60
DECAY_SHARE = 0.4  # last share of the steps, in which the learning rate falls to zero
# Of the phase against loops; lengths in tokens.
NUM_ANSWERS = 160  # of a round
MAX_PROMPT, MAX_NEW_TOKENS = 640, 256
MIN_RESPONSE = 24  # shorter answers do not loop: their rows lend no prompt
# Prompts made of two halves that do not belong together: users ask what the corpus never did, and
# that is where loops are.
MIXED_SHARE = 0.4
NGRAM = 4  # a token repeats when it ends a group of so many seen before in the answer
NUM_SAMPLES = 3  # continuations of a looping answer
SAMPLING = {"do_sample": True, "temperature": 0.9, "top_p": 0.95}
LR_SHARE = 0.06  # of the main phase's rates in the first round; falls linearly to zero
LESSONS_PER_STEP = 5


def optimizers_of(model: PreTrainedModel) -> list[Optimizer]:
    """Return Muon for the matrices inside layers, and AdamW for the rest."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed_tokens" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed_tokens" in name]
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95),
        torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def loss_of(model: PreTrainedModel, batch: Sequence[Text]) -> torch.Tensor:
    """Return the weighted mean loss of a batch, a scalar in nats a token.

    Tokens of positive weight cost -log(p), the cross-entropy; those of negative weight -log(1 - p), the
    unlikelihood of Welleck et al. 2019 (arXiv 1908.04319).
    """
    ids = pad_sequence([torch.tensor(text.token_ids) for text in batch], batch_first=True)
    weights = pad_sequence([torch.tensor(text.weights) for text in batch], batch_first=True)
    ids, weights = ids.to(model.device), weights[:, 1:].to(model.device)
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        logits = model(ids[:, :-1], use_cache=False).logits
    losses = F.cross_entropy(logits.float().mT, ids[:, 1:], reduction="none")
    unlikelihoods = -torch.log(-torch.expm1(-losses) + 1e-5)  # the small constant bounds it
    costs = torch.where(weights < 0, unlikelihoods, losses) * weights.abs()
    return costs.sum() / weights.abs().sum()


def train(
    model: PreTrainedModel, optimizers: list[Optimizer], batches: Iterator[list[Text]], steps: int
) -> list[float]:
    """Run the main phase; return the loss of each step, nats a token.

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


def draw_prompts(turns: Sequence[Turn], bos: int, rng: random.Random) -> list[list[int]]:
    """Draw the prompts of a round, some mixed of two; sorted by length, to pad little."""
    fit = [turn.prompt_ids for turn in turns if len(turn.response_ids) >= MIN_RESPONSE]
    usable = [ids for ids in fit if len(ids) < MAX_PROMPT]
    prompts = []
    for _ in range(NUM_ANSWERS if usable else 0):
        ids, other = rng.choice(usable), rng.choice(usable)
        if rng.random() < MIXED_SHARE:
            ids = other[: len(other) // 2] + ids[len(ids) // 2 :]
        prompts.append([bos, *ids])
    return sorted(prompts, key=len)


def repeated(token_ids: Sequence[int]) -> list[bool]:
    """Mark the tokens that end an n-gram seen before in the same text."""
    groups = [token_ids[end - NGRAM : end] for end in range(NGRAM, len(token_ids) + 1)]
    return [False] * (NGRAM - 1) + [group in groups[:at] for at, group in enumerate(groups)]


def lessons_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[list[int]]
) -> list[Text]:
    """Answer prompts greedily; make up to two texts of every answer that loops.

    They are the answer, whose repeated tokens are to become unlikely, and the longest sample from the
    place where the repetition began that ends without a loop, which is to become likely.
    """
    lessons = []
    length = {"max_new_tokens": MAX_NEW_TOKENS}
    answers = continued(model, tokenizer, prompts, do_sample=False, **length)
    for prompt, answer in zip(prompts, answers, strict=True):
        loop = find_loop(answer)
        if loop is None:
            continue
        marks = [-float(mark) for mark in repeated(answer)]
        lessons.append(Text(prompt + answer, [0.0] * len(prompt) + marks))
        kept = answer[: loop.position - corpus.LOOP_WINDOW + loop.period]
        starts = [prompt + kept] * NUM_SAMPLES
        samples = continued(model, tokenizer, starts, **SAMPLING, **length)
        ended = [tokens for tokens in samples if tokens[-1] == tokenizer.eos_token_id]
        ways_out = [tokens for tokens in ended if find_loop(kept + tokens) is None]
        if ways_out:
            way_out = max(ways_out, key=len)
            weights = [0.0] * len(starts[0]) + [1.0] * len(way_out)
            lessons.append(Text(starts[0] + way_out, weights))
    return lessons


def unlearn_loops(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    optimizers: list[Optimizer],
    turns: Sequence[Turn],
    batches: Iterator[list[Text]],
    rounds: int,
) -> None:
    """Run the phase against loops.

    A small model under greedy decoding falls into loops, and looped text flatters every drafting
    method; this removes the cause in the weights, where a decoding trick would hide it. A way out
    that the model itself would take keeps answers as long as they were; ending them instead makes
    them short. Every step also takes an ordinary batch, so that nothing else is forgotten.
    """
    rng = random.Random(0)
    for number in progress(range(rounds), desc="unlearning loops"):
        # A copy in bf16: autocast would convert every weight again at every token.
        speaker = copy.deepcopy(model).to(torch.bfloat16)
        lessons = lessons_of(speaker, tokenizer, draw_prompts(turns, tokenizer.bos_token_id, rng))
        rng.shuffle(lessons)
        for group in chain.from_iterable(each.param_groups for each in optimizers):
            group["lr"] = group["initial_lr"] * LR_SHARE * (1 - number / rounds)
        for start in range(0, len(lessons), LESSONS_PER_STEP):
            lesson = lessons[start : start + LESSONS_PER_STEP]
            (loss_of(model, next(batches)) + loss_of(model, lesson)).backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = OptionParser(prog="python -m scripts.demo_model", description=__doc__)
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="JSONL(.gz): prompt, response")
    add("--out", type=Path, required=True, help="model folder to write; must hold no model")
    add("--config", default=DEFAULT_MODEL, help="folder whose config.json is the shape")
    add("--tokenizer", help="folder of the tokenizer (default: train one)")
    add("--tokens", type=int, default=25_000_000, help="of the main phase (%(default)s)")
    add("--rounds", type=int, default=22, help="rounds against loops (%(default)s)")
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
    unlearn_loops(model, tokenizer, optimizers, turns, batches, args.rounds)
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
