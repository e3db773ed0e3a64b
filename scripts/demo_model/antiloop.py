"""Last phase of the demo model's training: unlearn its own loops.

A round is (1) greedy answers to training prompts, (2) finding those that repeat themselves,
(3) sampling from the place where the repetition began until a continuation ends without one,
(4) a few steps that make the repetition unlikely and that continuation likely instead, mixed with
ordinary training batches so that nothing else is forgotten.

A small model under greedy decoding falls into loops, and looped text flatters every drafting
method; this removes the cause in the weights, where a decoding trick would hide it. A way out that
the model itself would take keeps answers as long as they were; ending them instead makes them short.
The loss on repeated tokens is the unlikelihood -log(1 - p) of Welleck et al. 2019 (arXiv 1908.04319),
on whole generated answers.

Shapes: B sequences, T tokens each.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evaluation.answers.progress import progress
from scripts.demo_model.answers import continued
from scripts.demo_model.corpus import Turn
from scripts.demo_model.loops import WINDOW, find_loop
from scripts.demo_model.training import TOKENS_PER_STEP, Trainer, next_weights


@dataclass(frozen=True, slots=True)
class AntiLoopConfig:
    """Recipe of the phase; lengths in tokens."""

    rounds: int = 22
    answers: int = 160  # generated in a round
    batch_size: int = 64  # answers generated at once
    max_prompt: int = 160  # longest ordinary prompt
    long_prompt: int = 640  # longest prompt of all
    long_share: float = 0.35  # prompts longer than `max_prompt`, where there are such
    max_new_tokens: int = 256
    min_response: int = 24  # shorter answers do not loop: their rows lend no prompt
    two_turn_share: float = 0.3  # prompts that follow another exchange
    # Prompts made of two halves that do not belong together: users ask what the corpus never did,
    # and that is where loops are.
    mixed_share: float = 0.4
    ngram: int = 4  # a token repeats when it ends a group of so many seen before in the answer
    weight: float = 1.0  # of the unlikelihood beside the ordinary loss
    escapes: int = 3  # continuations sampled from the place where a repetition began
    temperature: float = 0.9
    top_p: float = 0.95
    escape_weight: float = 1.0  # of the continuation that is learned
    lr_factor: float = 0.06  # of the main phase's rates in the first round; falls linearly to zero


class Answer(NamedTuple):
    """A generated answer."""

    prompt_ids: list[int]
    token_ids: list[int]  # eos included, if it was reached
    num_kept: int = 0  # leading tokens that another answer had as well


class Lesson(NamedTuple):
    """One batch made of looping answers."""

    token_ids: Tensor  # [B, T] int64
    unlikely: Tensor  # [B, T] float32: 1 where a token repeats
    wanted: Tensor  # [B, T] float32: 1 on a continuation that leaves the repetition


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
) -> list[list[int]]:
    """Draw prompts, some long, some after another exchange; sorted by length, to pad little."""
    rng = random.Random(seed)
    chosen: list[list[int]] = []
    while len(chosen) < config.answers:
        if long_turns and rng.random() < config.long_share:
            chosen.append([bos, *rng.choice(long_turns).prompt_ids])
            continue
        turn, other = rng.choice(turns), rng.choice(turns)
        body = turn.prompt_ids
        if rng.random() < config.mixed_share:
            body = other.prompt_ids[: len(other.prompt_ids) // 2] + body[len(body) // 2 :]
        prompt = [bos, *body]
        if rng.random() < config.two_turn_share:
            prompt = [bos, *other.prompt_ids, *other.response_ids, *body]
        if len(prompt) <= config.max_prompt:
            chosen.append(prompt)
    return sorted(chosen, key=len)


def onset(token_ids: Sequence[int], ngram: int) -> int:
    """Count the tokens before the second round of the loop, where the repetition began.

    Endless answers without a loop are cut at their first repeated group, or in the middle.
    """
    loop = find_loop(token_ids)
    if loop is not None:
        return max(1, loop.position - WINDOW + loop.period)
    marks = repeated(token_ids, ngram)
    return marks.index(True) if True in marks else len(token_ids) // 2


def escapes_of(
    answers: Sequence[Answer],
    sample: Callable[[list[list[int]]], Sequence[list[int]]],
    eos: int,
    config: AntiLoopConfig,
) -> list[Answer | None]:
    """Sample for each answer one that ends without a loop, and is the same up to the repetition.

    Returns:
        One for each answer, `num_kept` the tokens before the repetition; None where no sample left it.
    """
    cuts = [onset(answer.token_ids, config.ngram) for answer in answers]
    pairs = list(zip(answers, cuts, strict=True))
    starts = [answer.prompt_ids + answer.token_ids[:cut] for answer, cut in pairs]
    samples = sample([start for start in starts for _ in range(config.escapes)])
    found: list[Answer | None] = []
    for index, (answer, cut) in enumerate(pairs):
        own = samples[index * config.escapes : (index + 1) * config.escapes]
        whole = [answer.token_ids[:cut] + tokens for tokens in own if tokens[-1] == eos]
        fine = [token_ids for token_ids in whole if find_loop(token_ids) is None]
        found.append(Answer(answer.prompt_ids, max(fine, key=len), cut) if fine else None)
    return found


def make_lessons(
    answers: Sequence[Answer],
    escapes: Sequence[Answer | None],
    config: AntiLoopConfig,
    pad: int,
) -> list[Lesson]:
    """Turn looping and endless answers, and the ways out of them, into batches of one shape.

    Each gives up to two sequences: the answer with its repeated tokens marked as unlikely, and the
    answer that left the repetition, marked as wanted from there on.
    """
    length = config.long_prompt + config.max_new_tokens
    size = max(1, TOKENS_PER_STEP // length)
    rows: list[tuple[list[int], list[float], list[float]]] = []
    for answer, escape in zip(answers, escapes, strict=True):
        prompt = [0.0] * len(answer.prompt_ids)
        marks = [float(mark) for mark in repeated(answer.token_ids, config.ngram)]
        full = answer.prompt_ids + answer.token_ids
        rows.append((full, prompt + marks, [0.0] * len(full)))
        if escape is not None:
            full = (escape.prompt_ids + escape.token_ids)[:length]
            start = len(escape.prompt_ids) + escape.num_kept
            rows.append((full, [0.0] * len(full), [0.0] * start + [1.0] * (len(full) - start)))
    random.Random(len(rows)).shuffle(rows)
    lessons = []
    for start in range(0, len(rows), size):
        token_ids = torch.full((size, length), pad)
        masks = torch.zeros(2, size, length)
        for index, (ids, unlikely, wanted) in enumerate(rows[start : start + size]):
            token_ids[index, : len(ids)] = torch.tensor(ids)
            masks[0, index, : len(ids)] = torch.tensor(unlikely)
            masks[1, index, : len(ids)] = torch.tensor(wanted)
        lessons.append(Lesson(token_ids, masks[0], masks[1]))
    return lessons


def unlikelihood(losses: Tensor) -> Tensor:
    """-log(1 - p) from the cross-entropy -log p; the small constant bounds it where p is 1."""
    return -torch.log(-torch.expm1(-losses) + 1e-5)


def lesson_step(trainer: Trainer, lesson: Lesson, config: AntiLoopConfig, factor: float) -> float:
    """Take one step on a lesson and an ordinary batch; return the ordinary loss."""
    plain = trainer.loss(next(trainer.stream))
    plain.backward()
    losses = trainer.losses(lesson.token_ids.to(trainer.device))
    unlikely, wanted = (next_weights(mask.to(trainer.device)) for mask in lesson[1:])
    loss = (unlikelihood(losses) * unlikely).sum() / unlikely.sum().clamp(min=1.0)
    escape_loss = (losses * wanted).sum() / wanted.sum().clamp(min=1.0)
    (config.weight * loss + config.escape_weight * escape_loss).backward()
    trainer.apply(factor)
    return plain.item()


def unlearn_loops(trainer: Trainer, config: AntiLoopConfig) -> None:
    """Run the rounds, with a line of the log for each."""
    tokenizer, turns = trainer.tokenizer, trainer.turns
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    fit = [turn for turn in turns if len(turn.response_ids) >= config.min_response]
    usable = [turn for turn in fit if len(turn.prompt_ids) < config.max_prompt]
    if not usable:
        print("no row is fit for the phase against loops; it is left out", file=sys.stderr)
        return
    lengths = range(config.max_prompt, config.long_prompt)
    long_turns = [turn for turn in turns if len(turn.prompt_ids) in lengths]
    sampling: dict[str, Any] = {"temperature": config.temperature, "top_p": config.top_p}
    for number in progress(range(config.rounds), desc="against loops"):
        seed = trainer.config.seed + 7919 * (number + 1)
        prompts = draw_prompts(usable, long_turns, config, bos, seed)
        torch.manual_seed(seed)
        # A copy in bf16: autocast would convert every weight again at every token.
        model = copy.deepcopy(trainer.model).to(torch.bfloat16)

        def continue_texts(texts: list[list[int]], **options: object) -> list[list[int]]:
            options["max_new_tokens"] = config.max_new_tokens
            return list(continued(model, texts, pad, eos, config.batch_size, **options))  # noqa: B023

        texts = continue_texts(prompts, do_sample=False)
        answers = [Answer(*pair) for pair in zip(prompts, texts, strict=True)]
        loops = [find_loop(answer.token_ids) is not None for answer in answers]
        ends = [answer.token_ids[-1] == eos for answer in answers]
        verdicts = zip(answers, ends, loops, strict=True)
        bad = [answer for answer, is_ended, is_looped in verdicts if is_looped or not is_ended]
        escapes = escapes_of(bad, partial(continue_texts, do_sample=True, **sampling), eos, config)
        factor = config.lr_factor * (1.0 - number / config.rounds)
        lessons = make_lessons(bad, escapes, config, pad)
        losses = [lesson_step(trainer, lesson, config, factor) for lesson in lessons]
        figures = {
            "round": number + 1,
            "ended": sum(ends) / len(answers),
            "looped": sum(loops) / len(answers),
            "escaped": sum(escape is not None for escape in escapes) / max(1, len(bad)),
            "mean_tokens": sum(map(len, texts)) / len(texts),
        }
        trainer.note(figures | ({"loss": sum(losses) / len(losses)} if losses else {}))
