"""A random case: a model, a method with options, and calls one after the other, each with an expected answer.

A case is drawn from a seed and a number alone, so that both together repeat it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any

from tests.model.decoded import SEEDED, random_ids
from tests.model.families.families import CHAINS, TREES

# Values of the options of each method that need no trained files.
OPTIONS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "vanilla": {},
    "recycling": {"output_id_topk": [1, 2, 8, 16], "tree_version": ["2.2.2", "auto"]},
    "recycling-averaged": {
        "output_id_topk": [1, 2, 8, 16],
        "tree_version": ["2.2.2", "auto"],
        "start": ["hot", "cold"],
        "policy": ["average", "accepted-last", "accepted-only"],
        "harvest_prompt": [True, False, None],
    },
    "pld": {
        "max_ngram_size": [1, 3, 5],
        "num_pred_tokens": [1, 4, 10, 40],
        "match": ["first", "latest"],
        "budget": ["fixed", "auto"],
    },
    "toolspec": {"num_pred_tokens": [1, 20], "history": [8, 4096], "start": ["hot", "cold"]},
    "adapld": {"max_ngram_size": [1, 3], "num_pred_tokens": [1, 10], "branches": [0, 4]},
    "lookahead": {"level": [2, 3, 5], "window": [1, 4, 7], "guess": [1, 7]},
    "samd": {
        "fallback": ["recycling", "none"],
        "num_pred_tokens": [4, 40],
        "match": ["latest", "first"],
    },
    "suffix": {
        "num_nodes": [1, 8, 64],
        "shape": ["path", "tree"],
        "max_spec_factor": [1.0, 4.0],
        "min_token_prob": [0.0, 0.1],
        "start": ["hot", "cold"],
    },
    "rest": {"num_nodes": [1, 16, 64], "draft_length": [1, 10]},
    "sssd": {"num_nodes": [1, 31], "draft_length": [1, 6], "budget": ["fixed", "auto"]},
    "sps": {"num_draft_tokens": [1, 5, 12]},
    "racer": {"num_nodes": [2, 20, 63], "ngram": [2, 10], "start": ["hot", "cold"]},
    "logitspec": {
        "num_nodes": [3, 63],
        "num_pred_tokens": [1, 20],
        "harvest_prompt": [True, False],
    },
    "goose": {"num_nodes": [10, 59], "max_chain": [1, 20], "start": ["hot", "cold"]},
    "cacheback": {"num_nodes": [4, 63], "leaders": [1, 256], "start": ["hot", "cold"]},
    "esp": {"num_nodes": [3, 59], "num_masks": [1, 2], "rate": [0.1, 0.9]},
    "stand": {"max_context": [1, 3], "row_tokens": [2, 10], "start": ["hot", "cold"]},
    "medusa": {"num_nodes": [4, 63]},
    "hydra": {"num_nodes": [4, 63]},
    "eagle": {"num_nodes": [5, 25]},
    "eagle2": {"num_nodes": [5, 59], "depth": [1, 6], "width": [2, 10]},
    "eagle3": {"num_nodes": [5, 59], "depth": [1, 8], "width": [2, 10]},
    "dflash": {"confidence": [0.0]},
    "hybrid": {
        "num_nodes": [2, 20, 63],
        "budget": ["auto", "fixed"],
        "output_id_topk": [2, 8],
        "start": ["hot", "cold"],
        "neighbours": [0, 32],
    },
}
# Share of the cases in which the model is changed between calls.
SHARE_WITH_CHANGES = 0.1
DOORS = ("generate", "stream", "left", "all", "threads", "accelerate", "callable", "rows")


@lru_cache
def family_names() -> tuple[str, ...]:
    """Return the families that are decoded and that the installed transformers computes right."""
    return tuple(one.name for one in (*TREES, *CHAINS) if one.is_known and not one.is_broken)


@dataclass
class Call:
    """Texts asked for through one door.

    Attributes:
        door: how they are asked for, of `DOORS`.
        prompts: token ids of each text; one but for "all", "threads" and "rows".
        limits: of each text.
        sampling: temperature, top_k, top_p and seed; {} decodes greedily.
        processors: names and values of transformers' processors, in order.
        ends: tokens that end a text.
        stop_strings: strings that end one.
        batch_size: of "all".
        shares_memory: of "all".
    """

    door: str
    prompts: list[list[int]]
    limits: list[int]
    sampling: dict[str, Any] = field(default_factory=dict)
    processors: list[tuple[str, Any]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    stop_strings: list[str] = field(default_factory=list)
    batch_size: int = 1
    shares_memory: bool = True


@dataclass
class Case:
    """A model, a method and calls.

    Attributes:
        seed, number: what it is drawn from.
        family: of the model.
        use_kernels: whether the target has kernels.
        method: the method.
        options: its options, but for files.
        random: draws calls, and changes between them, as the case goes on.
        num_calls: how many.
        has_changes: whether the model is changed between calls.
    """

    seed: int
    number: int
    family: str = ""
    use_kernels: bool = True
    method: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    random: Random = field(default_factory=Random)
    num_calls: int = 0
    has_changes: bool = False

    @classmethod
    def drawn(cls, seed: int, number: int, families: Sequence[str] = ()) -> Case:
        """Return a case, the same for the same arguments."""
        random = Random(f"{seed}/{number}")
        method = random.choice([*OPTIONS, "recycling", "hybrid"])
        options = {
            name: random.choice([*values])
            for name, values in OPTIONS[method].items()
            if random.random() < 0.4
        }
        return cls(
            seed,
            number,
            family=random.choice([*(families or family_names())]),
            use_kernels=random.random() < 0.75,
            method=method,
            options=options,
            random=random,
            num_calls=random.randint(3, 9),
            has_changes=random.random() < SHARE_WITH_CHANGES,
        )

    def __str__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        kernels = "kernels" if self.use_kernels else "no kernels"
        return f"{self.family}, {kernels}, {self.method}{options}"

    @property
    def command(self) -> str:
        """The command line that repeats the case."""
        return f"python -m tests.fuzz --seed {self.seed} --case {self.number}"

    def call(self, last: list[int], vocab_size: int, alphabet: str) -> Call:
        """Draw a call; `last` is the last text, whose beginning a prompt may share."""
        random = self.random
        door = random.choice(DOORS)
        num_texts = random.randint(2, 6) if door in ("all", "threads", "rows") else 1
        prompts = [self._prompt(last, vocab_size) for _ in range(num_texts)]
        call = Call(door, prompts, [random.choice([1, 2, 7, 16, 30]) for _ in prompts])
        if door == "rows" or random.random() < 0.5:
            call.limits = [call.limits[0]] * num_texts
        is_seeded = self.method in SEEDED  # else its texts are other draws than plain decoding's
        if random.random() < 0.3 and door != "rows" and is_seeded:
            call.sampling = {
                "temperature": random.choice([0.3, 0.9, 1.6]),
                "top_k": random.choice([0, 1, 5, 30]),
                "top_p": random.choice([1.0, 0.9, 0.4]),
                "seed": random.randrange(1000),
            }
        if random.random() < 0.3:
            call.processors = random.sample(PROCESSORS, random.randint(1, 2))
        if random.random() < 0.3:
            call.ends = random.sample(range(vocab_size), random.choice([1, 3, 12]))
        if random.random() < 0.2:
            call.stop_strings = ["".join(random.choices(alphabet, k=random.choice([1, 1, 2])))]
        if door == "all":
            call.batch_size = random.choice([1, 2, 3, 8])
            call.shares_memory = random.random() < 0.6
        return call

    def _prompt(self, last: list[int], vocab_size: int) -> list[int]:
        random = self.random
        seed, kind = random.randrange(10**6), random.randrange(7)
        if kind == 0:
            return random_ids(1, seed, vocab_size)
        if kind == 1:
            return random_ids(random.randint(2, 4), seed, vocab_size) * random.randint(2, 6)
        if kind == 2 and 0 < len(last) < 60:
            return [*last, *random_ids(random.randint(1, 4), seed, vocab_size)]
        if kind == 3 and last:
            return last[: random.randint(1, len(last))]
        if kind == 4 and last:
            kept = last[: random.randint(1, len(last))][:50]
            return [*kept, *random_ids(random.randint(1, 8), seed, vocab_size)]
        return random_ids(random.choice([2, 5, 9, 17, 40, 47, 48, 49, 70]), seed, vocab_size)


PROCESSORS: list[tuple[str, Any]] = [
    ("RepetitionPenaltyLogitsProcessor", (1.3,)),
    ("NoRepeatNGramLogitsProcessor", (2,)),
    ("SuppressTokensLogitsProcessor", ([3, 9, 27, 29],)),
    ("NoBadWordsLogitsProcessor", ([[5], [7, 11]],)),
    ("MinPLogitsWarper", (0.05,)),
]
