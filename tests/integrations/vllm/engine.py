"""A serving engine in small: its scheduler cuts drafts, chunks prompts, preempts and reorders, as vLLM's does.

Its model is a function of the last two tokens, so every row of logits is known.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from token_recycling_vllm.seams import TopRows

VOCAB = 40


def likeliest(context: list[int], k: int) -> list[int]:
    """Return the k likeliest tokens after a context: a function of its last two tokens."""
    numbers = random.Random(hash(tuple(context[-2:]))).sample(range(VOCAB), k)
    return numbers


def continued(prompt: list[int], count: int) -> list[int]:
    """Return a prompt and the tokens that plain decoding adds."""
    text = list(prompt)
    for _ in range(count):
        text.append(likeliest(text, 1)[0])
    return text


@dataclass
class Job:
    """A request in the engine."""

    prompt: list[int]
    most_new: int
    text: list[int] = field(default_factory=list)
    num_computed: int = 0
    draft: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.text = list(self.prompt)

    @property
    def is_done(self) -> bool:
        return len(self.text) >= len(self.prompt) + self.most_new


class Hook:
    """Stands in for `LogitsHook`: hands over the rows of the engine's step."""

    def __init__(self) -> None:
        self.steps: list[TopRows] = []

    def take(self) -> TopRows | None:
        steps, self.steps = self.steps, []
        return steps[0] if len(steps) == 1 else None


class Engine:
    """Serves jobs with a proposer.

    Args:
        proposer: drafts.
        jobs: requests, served in this order.
        rng: decides what is cut, preempted and reordered; None: nothing is.
        most_running: jobs of a batch.
        chunk: prompt tokens of a step.
    """

    def __init__(self, proposer, jobs, rng=None, most_running=4, chunk=1000, k=4) -> None:
        self.proposer, self.rng, self.k = proposer, rng, k
        self.hook = proposer._logits = Hook()
        self.waiting, self.running = list(jobs), []
        self.most_running, self.chunk = most_running, chunk
        self.num_steps = 0

    def run(self) -> None:
        while self.waiting or self.running:
            self.step()

    def chance(self, share: float) -> bool:
        return self.rng is not None and self.rng.random() < share

    def step(self) -> None:
        while self.waiting and len(self.running) < self.most_running:
            self.running.append(self.waiting.pop(0))
        if self.chance(0.05):  # preempted: its cache is gone, and its draft
            job = self.rng.choice(self.running)
            job.num_computed, job.draft = 0, []
        if self.chance(0.2):
            self.rng.shuffle(self.running)
        batch = [job for job in self.running if not self.chance(0.1)] or self.running[:1]
        ids, fed, sampled = [], [], []
        for job in batch:
            rest = job.text[job.num_computed :]
            if len(rest) > self.chunk:  # in the middle of a prompt
                job.num_computed += self.chunk
                rows, tokens = [job.text[: job.num_computed]], []
                job.draft = []
            else:
                draft = job.draft
                if self.chance(0.15):
                    draft = draft[: self.rng.randrange(len(draft) + 1)]
                room = len(job.prompt) + job.most_new - len(job.text)
                rows = [job.text + draft[:n] for n in range(len(draft) + 1)]
                tokens = []
                for row in rows:
                    tokens.append(likeliest(row, 1)[0])
                    if len(tokens) == len(rows) or draft[len(tokens) - 1] != tokens[-1]:
                        break
                tokens = tokens[:room]
                job.num_computed = len(job.text) + len(tokens) - 1
                job.text += tokens
            ids += [likeliest(row, self.k) for row in rows]
            fed += [row[-1] for row in rows]
            sampled.append(tokens)
        if self.chance(0.05):  # logits of a prompt, computed beside
            self.hook.steps.append(
                TopRows(np.zeros((1, self.k), np.int32), np.ones((1, self.k), np.float32), None)
            )
        shares = np.tile(np.float32([0.7, 0.2, 0.06, 0.04][: self.k]), (len(ids), 1))
        self.hook.steps.append(TopRows(np.array(ids, np.int32), shares, np.array(fed)))
        length = max(len(job.text) for job in batch) + 10
        texts = np.zeros((len(batch) + 2, length), np.int32)
        lengths = np.zeros(len(batch) + 2, np.int32)
        for place, job in enumerate(batch):
            texts[place, : len(job.text)] = job.text
            lengths[place] = len(job.text)
        self.num_steps += 1
        if self.chance(0.03):  # near the end of the context, vLLM does not ask the drafter
            for job in batch:
                job.draft = []
        else:
            drafts = self.proposer.propose(sampled, lengths, texts, slot_mappings=None)
            for job, draft, tokens in zip(batch, drafts, sampled, strict=True):
                assert tokens or not draft
                job.draft = draft
        self.running = [job for job in self.running if not job.is_done]
