"""Last phase of the demo model's training: unlearn its own loops.

What: rounds of (1) greedy answers to training prompts, (2) finding those that repeat themselves,
(3) a few steps that make the repetition unlikely and the end of the turn likely instead, mixed
with ordinary training batches so that nothing else is forgotten.
Why: a small model under greedy decoding falls into loops, and looped text flatters every drafting
method; this removes the cause in the weights, where a decoding trick would hide it.
How: called by ``scripts.train_demo_model``. The loss on repeated tokens is the unlikelihood
-log(1 - p) of Welleck et al. 2019 (arXiv 1908.04319), on whole generated answers.
"""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from scripts.demo_corpus import Turn
from scripts.demo_training import LOG, Batch, Trainer, append_line, next_weights
from scripts.loops import WINDOW, find_loop

# B sequences, T tokens each.


@dataclass(frozen=True, slots=True)
class AntiLoopConfig:
    """Recipe of the phase.

    Attributes:
        rounds: Number of rounds, counted over restarts.
        answers: Answers generated in a round.
        batch_size: Answers generated at once.
        max_prompt: Longest ordinary prompt, in tokens.
        long_prompt: Longest prompt of all, in tokens.
        long_share: Share of prompts that are longer than ``max_prompt``, where there are such.
        max_new_tokens: Longest answer, in tokens.
        min_response: Only rows whose own answer has at least this many tokens lend their prompt:
            short answers do not loop.
        two_turn_share: Share of prompts that follow another exchange.
        mixed_share: Share of prompts made of two halves that do not belong together: users ask what
            the corpus never did, and that is where loops are.
        ngram: A token is repeated when it ends a group of this many seen before in the answer.
        weight: Weight of the unlikelihood beside the ordinary loss.
        end_weight: Weight of ending the turn where the repetition began.
        lr_factor: Learning rates of the first round, as a share of the main phase's; they fall
            linearly to zero over the rounds.
    """

    rounds: int = 24
    answers: int = 128
    batch_size: int = 64
    max_prompt: int = 160
    long_prompt: int = 640
    long_share: float = 0.3
    max_new_tokens: int = 256
    min_response: int = 24
    two_turn_share: float = 0.25
    mixed_share: float = 0.3
    ngram: int = 4
    weight: float = 1.0
    end_weight: float = 0.05
    lr_factor: float = 0.06

    def __post_init__(self) -> None:
        """Reject counts below one."""
        for name in ("answers", "batch_size", "max_prompt", "max_new_tokens", "ngram"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed 1 or more")
        if self.long_prompt < self.max_prompt:
            raise ValueError(
                f"long_prompt: got {self.long_prompt}, allowed max_prompt ({self.max_prompt}) or more"
            )


class Answer(NamedTuple):
    """A generated answer."""

    prompt_ids: list[int]
    token_ids: list[int]  # eos included, if it was reached
    is_ended: bool


class Lesson(NamedTuple):
    """One batch made of looping answers."""

    token_ids: Tensor  # [B, T] int64
    unlikely: Tensor  # [B, T] float32: 1 where a token repeats
    ends: Tensor  # [B, T] float32: 1 at an eos put where the repetition began


def repeated(token_ids: Sequence[int], ngram: int) -> list[bool]:
    """Mark the tokens that end an n-gram seen before in the same text."""
    seen: set[tuple[int, ...]] = set()
    marks = []
    for position in range(len(token_ids)):
        group = tuple(token_ids[max(0, position - ngram + 1) : position + 1])
        marks.append(len(group) == ngram and group in seen)
        seen.add(group)
    return marks


def draw_prompts(
    turns: Sequence[Turn], long_turns: Sequence[Turn], config: AntiLoopConfig, bos: int, seed: int
) -> list[Turn]:
    """Draw prompts, some long, some after another exchange; sorted by length, to pad little."""
    rng = random.Random(seed)
    chosen: list[Turn] = []
    while len(chosen) < config.answers:
        if long_turns and rng.random() < config.long_share:
            turn = rng.choice(long_turns)
            chosen.append(Turn([bos, *turn.prompt_ids], turn.response_ids))
            continue
        turn, other = rng.choice(turns), rng.choice(turns)
        body = turn.prompt_ids
        if rng.random() < config.mixed_share:
            body = other.prompt_ids[: len(other.prompt_ids) // 2] + body[len(body) // 2 :]
        prompt = [bos, *body]
        if rng.random() < config.two_turn_share:
            prompt = [bos, *other.prompt_ids, *other.response_ids, *body]
        if len(prompt) <= config.max_prompt:
            chosen.append(Turn(prompt, turn.response_ids))
    return sorted(chosen, key=lambda turn: len(turn.prompt_ids))


@torch.no_grad()
def generate(
    trainer: Trainer, prompts: Sequence[list[int]], config: AntiLoopConfig
) -> list[Answer]:
    """Answer the prompts by greedy decoding in bf16, left padded."""
    pad, eos = trainer.tokenizer.pad_token_id, trainer.tokenizer.eos_token_id
    # A bf16 copy: autocast would convert every weight again at every token.
    speaker = copy.deepcopy(trainer.model).to(torch.bfloat16)
    answers = []
    for start in range(0, len(prompts), config.batch_size):
        group = prompts[start : start + config.batch_size]
        width = max(len(prompt) for prompt in group)
        token_ids = torch.tensor([[pad] * (width - len(p)) + p for p in group])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in group])
        output = speaker.generate(
            token_ids.to(trainer.device),
            attention_mask=mask.to(trainer.device),
            max_new_tokens=config.max_new_tokens,
            do_sample=False,
        )
        for prompt, row in zip(group, output[:, width:].tolist(), strict=True):
            is_ended = eos in row
            answers.append(Answer(prompt, row[: row.index(eos) + 1] if is_ended else row, is_ended))
    return answers


def make_lessons(
    answers: Sequence[Answer], config: AntiLoopConfig, pad: int, eos: int, size: int
) -> list[Lesson]:
    """Turn looping and endless answers into batches of one shape.

    Each gives two sequences: the answer with its repeated tokens marked as unlikely, and the answer
    cut where the repetition began, with an eos marked as wanted.
    """
    length = config.long_prompt + config.max_new_tokens
    rows: list[tuple[list[int], list[float], list[float]]] = []
    for answer in answers:
        loop = find_loop(answer.token_ids)
        if loop is None and answer.is_ended:
            continue
        marks = repeated(answer.token_ids, config.ngram)
        prompt = [0.0] * len(answer.prompt_ids)
        full = answer.prompt_ids + answer.token_ids
        rows.append((full, prompt + [float(mark) for mark in marks], [0.0] * len(full)))
        if loop is not None:
            onset = max(1, loop.position - WINDOW + loop.period)
            cut = answer.prompt_ids + answer.token_ids[:onset] + [eos]
            rows.append((cut, [0.0] * len(cut), [0.0] * (len(cut) - 1) + [1.0]))
    random.Random(len(rows)).shuffle(rows)
    lessons = []
    for start in range(0, len(rows), size):
        token_ids = torch.full((size, length), pad)
        masks = torch.zeros(2, size, length)
        for index, (ids, unlikely, ends) in enumerate(rows[start : start + size]):
            token_ids[index, : len(ids)] = torch.tensor(ids)
            masks[0, index, : len(ids)] = torch.tensor(unlikely)
            masks[1, index, : len(ids)] = torch.tensor(ends)
        lessons.append(Lesson(token_ids, masks[0], masks[1]))
    return lessons


def unlikelihood(losses: Tensor) -> Tensor:
    """-log(1 - p) from the cross-entropy -log p; the small constant bounds it where p is 1."""
    return -torch.log(-torch.expm1(-losses) + 1e-5)


def lesson_step(trainer: Trainer, lesson: Lesson, replay: Batch, config: AntiLoopConfig) -> float:
    """One optimizer step on a lesson and an ordinary batch; returns the ordinary loss."""
    device = trainer.device
    plain = trainer.forward(replay).mean()
    plain.backward()
    losses = trainer.losses(trainer.model, lesson.token_ids.to(device))
    unlikely = next_weights(lesson.unlikely.to(device))
    ends = next_weights(lesson.ends.to(device))
    loss = (unlikelihood(losses) * unlikely).sum() / unlikely.sum().clamp(min=1.0)
    end_loss = (losses * ends).sum() / ends.sum().clamp(min=1.0)
    (config.weight * loss + config.end_weight * end_loss).backward()
    factor = config.lr_factor * (1.0 - trainer.progress.rounds / config.rounds)
    trainer.optimizers.step(trainer.config.muon_lr * factor, trainer.config.adam_lr * factor)
    return plain.item()


def unlearn_loops(trainer: Trainer, config: AntiLoopConfig) -> None:
    """Run the rounds that are left, with a checkpoint and a log line after each."""
    tokenizer = trainer.tokenizer
    usable = [
        turn
        for turn in trainer.turns.train
        if len(turn.response_ids) >= config.min_response
        and len(turn.prompt_ids) < config.max_prompt
    ]
    if not usable:
        print("no row is fit for the phase against loops; it is left out", file=sys.stderr)
        return
    long_turns = [
        turn
        for turn in trainer.turns.train
        if config.max_prompt <= len(turn.prompt_ids) < config.long_prompt
    ]
    stream = trainer.stream()
    size = max(1, trainer.config.tokens_per_step // (config.long_prompt + config.max_new_tokens))
    bar = tqdm(total=config.rounds, desc="against loops", file=sys.stderr)
    bar.update(trainer.progress.rounds)
    while trainer.progress.rounds < config.rounds:
        started = time.perf_counter()
        seed = trainer.config.seed + 7919 * (trainer.progress.rounds + 1)
        turns = draw_prompts(usable, long_turns, config, tokenizer.bos_token_id, seed)
        answers = generate(trainer, [turn.prompt_ids for turn in turns], config)
        lessons = make_lessons(
            answers, config, tokenizer.pad_token_id, tokenizer.eos_token_id, size
        )
        losses = [lesson_step(trainer, lesson, next(stream), config) for lesson in lessons]
        trainer.progress.rounds += 1
        trainer.progress.step += len(lessons)
        trainer.progress.seconds += time.perf_counter() - started
        entry = {
            "step": trainer.progress.step,
            "round": trainer.progress.rounds,
            "seconds": round(trainer.progress.seconds, 2),
            "ended": sum(answer.is_ended for answer in answers) / len(answers),
            "looped": sum(find_loop(a.token_ids) is not None for a in answers) / len(answers),
        }
        entry["mean_tokens"] = sum(len(answer.token_ids) for answer in answers) / len(answers)
        if losses:
            entry["loss"] = round(sum(losses) / len(losses), 4)
        append_line(trainer.work / LOG, entry)
        trainer.save()
        bar.set_postfix(looped=f"{entry['looped']:.1%}", ended=f"{entry['ended']:.1%}")
        bar.update()
    bar.close()
