r"""Is sampling exact? Draws of every method against the exact distribution, and against plain decoding.

A random model with few tokens makes the distribution of short texts known: every text is listed and
its probability computed by plain passes. Two checks for each method and setting:

- many short samples, drawn one after another so that what a method learns from earlier ones shapes
  its drafts, are compared with the exact distribution: chi-square (texts expected fewer than 5 times
  pooled), total variation, and texts that cannot occur;
- longer texts are compared token by token with those of plain decoding under the same random
  numbers: one draw per emitted token makes them equal. Not those of methods whose drafts are drawn, too.

The samples are the same at every run with the same seed.

Run:
    python -m evaluation.sampling_check --method recycling lookahead

Exit code: 0 all checks pass, 1 one fails, 2 wrong usage.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM, RepetitionPenaltyLogitsProcessor
from transformers.utils import logging as transformers_logging

from evaluation.reporting.tables import json_line, markdown_table
from model.backends.target import TargetModel
from model.commands.command_line import OptionParser, UserError, run_command, user_errors
from model.engine.drafter import Drafter
from model.engine.loop import generate
from model.engine.rules import Processor, SamplingRule, TokenRule, sampling_processors
from model.machine.timing import progress
from model.methods import METHODS, find_method
from model.methods.heads.drafter import HeadDrafter
from model.methods.rest.datastore import Datastore
from model.methods.vanilla.drafter import VanillaConfig, VanillaDrafter

EXAMPLES = """\
examples:
  python -m evaluation.sampling_check
  python -m evaluation.sampling_check --method recycling --num-samples 20000 --seed 1
"""
VOCAB_SIZE = 8
# Random tokens of the datastore that rest drafts from: every end of a text of three tokens is in it.
CORPUS = 4000
PROMPT = (1, 2, 3)
# Tokens of a sample: 512 texts, enough for a draft of two to be accepted.
LENGTH = 3
NUM_LONG_TEXTS, LONG_LENGTH = 5, 30
# A correct sampler fails one check in ten thousand by chance.
LEAST_P_VALUE = 1e-4
# Below this a chi-square's cell is no longer near normal.
LEAST_EXPECTED = 5
# Token ids, and the number of steps that they took.
Text = tuple[tuple[int, ...], int]
MakeRule = Callable[[Sequence[Processor], torch.Generator], TokenRule]


class Setting(NamedTuple):
    """How tokens are drawn; 0, 1 and 1 leave top-k, top-p and the penalty out."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def processors(self) -> list[Processor]:
        """Return transformers' processors, in the order of its own sampling."""
        warpers: list[Processor] = list(
            sampling_processors(self.temperature, self.top_k, self.top_p)
        )
        if self.repetition_penalty == 1:
            return warpers
        return [RepetitionPenaltyLogitsProcessor(self.repetition_penalty), *warpers]

    def __str__(self) -> str:
        changed = [
            f"{name.replace('_', ' ')} {value:g}"
            for name, value in self._asdict().items()
            if name == "temperature" or value != self._field_defaults[name]
        ]
        return ", ".join(changed)


SETTINGS = (
    Setting(1.0),
    Setting(0.7, top_p=0.9),
    Setting(0.7, top_k=4),
    Setting(0.7, repetition_penalty=1.3),
    Setting(0.7, top_k=6, top_p=0.95, repetition_penalty=1.3),
)


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one method under one setting."""

    method: str
    setting: str
    num_samples: int
    p_value: float  # of the chi-square; small if the samples do not follow the distribution
    # Half the summed distance of the two distributions, sampling noise included.
    total_variation: float
    num_impossible: int  # samples that have no probability at all
    # Long texts that are not plain decoding's under the same random numbers; None: the drafts are drawn, too.
    num_differing: int | None
    # Tokens a step over the samples and texts; 1 if no draft was ever accepted.
    mean_accepted: float

    @property
    def is_passed(self) -> bool:
        """Whether nothing contradicts exact sampling."""
        is_likely = self.p_value >= LEAST_P_VALUE
        return is_likely and self.num_impossible == 0 and not self.num_differing


class Sampler:
    """The small model and the checks on it; `seed` is that of the weights and of all draws."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.target = TargetModel(_random_model(seed, num_layers=2))
        self._plain: dict[Setting, list[Text]] = {}

    @torch.inference_mode()
    def distribution(self, setting: Setting) -> dict[tuple[int, ...], float]:
        """Return the probability of every text of `LENGTH` tokens, from plain passes."""
        found: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(LENGTH):
            prefixes = torch.tensor([[*PROMPT, *text] for text in found])
            scores = self.target.model(prefixes, use_cache=False).logits[:, -1].float()
            for processor in setting.processors():
                scores = processor(prefixes, scores)
            rows = zip(found.items(), scores.softmax(dim=-1).tolist(), strict=True)
            found = {
                (*text, token): probability * share
                for (text, probability), row in rows
                for token, share in enumerate(row)
            }
        return found

    def check(
        self, method: str, setting: Setting, num_samples: int, make_rule: MakeRule = SamplingRule
    ) -> Check:
        """Check one method under one setting with `num_samples` short texts.

        `make_rule` makes the rule that draws, from processors and a generator.
        """
        with tempfile.TemporaryDirectory() as folder:
            drafter = self._drafter(method, folder)
            rule = make_rule(setting.processors(), self._generator())
            short = [self._text(drafter, rule, LENGTH) for _ in range(num_samples)]
            rule = make_rule(setting.processors(), self._generator())
            long = [self._text(drafter, rule, LONG_LENGTH) for _ in range(NUM_LONG_TEXTS)]
        plain = self._plain_texts(setting)
        counts = Counter(token_ids for token_ids, _ in short)
        expected = self.distribution(setting)
        return Check(
            method,
            str(setting),
            num_samples,
            p_value(counts, expected),
            total_variation(counts, expected),
            sum(count for text, count in counts.items() if expected[text] == 0),
            None
            if drafter.needs.draws
            else sum(mine != its for (mine, _), (its, _) in zip(long, plain, strict=True)),
            sum(len(token_ids) for token_ids, _ in (*short, *long))
            / sum(num_steps for _, num_steps in (*short, *long)),
        )

    def _plain_texts(self, setting: Setting) -> list[Text]:
        if setting not in self._plain:
            drafter = VanillaDrafter(VanillaConfig(), self.target.vocab_size, self.target.device)
            rule = SamplingRule(setting.processors(), self._generator())
            self._plain[setting] = [
                self._text(drafter, rule, LONG_LENGTH) for _ in range(NUM_LONG_TEXTS)
            ]
        return self._plain[setting]

    def _text(self, drafter: Drafter, rule: TokenRule, length: int) -> Text:
        done = generate(self.target, drafter, PROMPT, max_new_tokens=length, rule=rule)
        return tuple(done.token_ids), len(done.steps)

    def _drafter(self, method: str, folder: str) -> Drafter:
        cls = find_method(method).drafter_class
        vocab_size = self.target.vocab_size
        options: dict[str, Any] = {
            item.name: vocab_size  # no row holds more tokens than there are
            for item in fields(cls.config_class)
            if item.name == "output_id_topk"
            and isinstance(item.default, int)
            and item.default > vocab_size
        }
        if cls.drafts_with() == "draft_model":
            _random_model(self._seed + 1, num_layers=1).save_pretrained(folder)
            options["draft_model"] = folder
        if cls.drafts_with() == "datastore":
            tokens = torch.randint(vocab_size, (CORPUS,), generator=self._generator())
            options["datastore"] = f"{folder}/datastore.npy"
            Datastore.build([tokens.tolist()]).save(Path(options["datastore"]))
        if issubclass(cls, HeadDrafter):
            cls.write_untrained_heads(Path(folder), self.target.config)
            options["heads"] = folder
        return cls(cls.config_class(**options), vocab_size, self.target.device)

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed)


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Return the p-value of a chi-square test of counts against expected shares; rare texts are pooled.

    A `UserError` if there are too few samples for a test.
    """
    total = sum(counts.values())
    means = np.array([total * share for share in expected.values()])
    seen = np.array([counts[text] for text in expected], dtype=float)
    is_common = means >= LEAST_EXPECTED
    cells = [(seen[is_common], means[is_common])]
    if means[~is_common].sum() > 0:
        cells.append((seen[~is_common].sum(keepdims=True), means[~is_common].sum(keepdims=True)))
    observed, mean = (np.concatenate(parts) for parts in zip(*cells, strict=True))
    if len(mean) < 2:
        raise UserError(
            f"num_samples: got {total}, too few for a chi-square test; give a few hundred or more"
        )
    # Samples that cannot occur are counted apart: they have no cell.
    mean *= observed.sum() / mean.sum()
    return float(stats.chisquare(observed, mean).pvalue)


def total_variation(
    counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]
) -> float:
    """Return half the summed distance between observed shares and probabilities."""
    total = sum(counts.values())
    return sum(abs(counts[text] / total - share) for text, share in expected.items()) / 2


def _random_model(seed: int, num_layers: int) -> LlamaForCausalLM:
    """Return a random Llama whose next token depends on its prefix, without being certain."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each check and one line of JSON; return 1 if a check fails."""
    parser = OptionParser(
        prog="python -m evaluation.sampling_check",
        description="Compare samples of methods with the exact distribution of a small model.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--method", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument(
        "--num-samples",
        type=int,
        default=1000,
        metavar="N",
        help="short texts for each method and setting (default: 1000)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="SEED", help="default: 0")
    options = parser.parse_args(argv)
    if options.num_samples < 1:
        raise UserError(f"num_samples: got {options.num_samples}; allowed: 1 or more")
    if not 0 <= options.seed < 2**63:
        raise UserError(f"seed: got {options.seed}; allowed: 0 or more, less than 2**63")
    with user_errors():
        options.method = [find_method(name).name for name in options.method or METHODS]
    transformers_logging.disable_progress_bar()
    sampler = Sampler(options.seed)
    asked = list(product(options.method, SETTINGS))
    with progress(asked, unit="check") as bar:
        checks = [sampler.check(method, setting, options.num_samples) for method, setting in bar]
    header = ["Method", "Setting", "Samples", "p", "Total variation", "Impossible", "Texts differ"]
    rows = [
        [
            *(check.method, check.setting, str(check.num_samples), f"{check.p_value:.3g}"),
            *(f"{check.total_variation:.4f}", str(check.num_impossible)),
            "-" if check.num_differing is None else str(check.num_differing),
            *(f"{check.mean_accepted:.2f}", "yes" if check.is_passed else "NO"),
        ]
        for check in checks
    ]
    print(markdown_table([*header, "MAT", "Exact"], rows, num_text_columns=2))
    is_passed = all(check.is_passed for check in checks)
    print(json_line({"passed": is_passed, "checks": [asdict(check) for check in checks]}))
    return 0 if is_passed else 1


if __name__ == "__main__":
    run_command(main)
