"""The law of `custom_generate`: with any method and options the tokens equal those of `generate`.

In float32 nothing may differ. Every family has recycling with every option set, and three more methods;
every method has every option set with some family. Sampling starts from the same seed of torch's global
generator.

Run: pytest tests/model/api/test_custom_generate_laws.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
)

from model.api.accelerate import Speculative, speculative
from model.methods import METHODS
from tests.model.decoded import (
    SEEDED,
    known,
    methods_of,
    random_ids,
    required_options,
    with_methods,
)
from tests.pairs import ALL_PAIRS

FAMILIES = [
    "Llama, grouped heads",
    "Qwen2, sliding window",
    "Qwen3",
    "Qwen3-MoE",
    "Mistral, sliding window",
    "Mixtral",
    "Gemma 2",
    "Gemma 3 text",
    "Phi",
    "Phi 3",
    "OLMo 2",
    "SmolLM3",
    "GPT-NeoX",
    "GPT-2",
    "OPT",
    "DeepSeek-V3",
    "Cohere 2",
    "GLM-4",
    "BLOOM",
    "Falcon, alibi",
]
NUM_TOKENS = 7
PROMPT = torch.tensor([random_ids(12, seed=8)])
PADDED = torch.cat((torch.zeros(1, 3, dtype=torch.long), PROMPT), dim=1)


class EndsOnMultiples(StoppingCriteria):
    """Ends a text at the first new token that seven divides."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return whether the last token ends the text [1]."""
        return input_ids[:, -1] % 7 == 0


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "two ends": {"eos_token_id": [29, 55, 61], "min_new_tokens": 5},
    "forbidden": {"bad_words_ids": [[4], [9, 12]], "suppress_tokens": list(range(20, 40))},
    "forced": {"eos_token_id": 3, "forced_eos_token_id": 3},
    "criteria": {"stopping_criteria": StoppingCriteriaList([EndsOnMultiples()])},
    "bias": {"sequence_bias": {(10,): 3.0, (11, 12): -8.0}, "renormalize_logits": True},
    "config": {
        "generation_config": GenerationConfig(
            max_new_tokens=5, eos_token_id=[2, 8], pad_token_id=0, repetition_penalty=0.8
        )
    },
    "own processor": {"logits_processor": [TopKLogitsWarper(5)], "repetition_penalty": 1.5},
    "narrow sampling": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 12},
    "penal sampling": {"do_sample": True, "repetition_penalty": 1.4, "min_p": 0.05},
    "padding": {"attention_mask": (torch.arange(15) >= 3).long()[None], "repetition_penalty": 1.2},
}


def tokens_of(
    model: PreTrainedModel, options: Mapping[str, Any], decode: Speculative | None = None
) -> list[int]:
    """Return the tokens of `generate`, with or without a method."""
    inputs = PADDED if "attention_mask" in options else PROMPT
    arguments = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": NUM_TOKENS}
    if "generation_config" in options:
        del arguments["max_new_tokens"]
    torch.manual_seed(5)
    found = model.generate(inputs, **{**arguments, **options}, custom_generate=decode)
    return found[0, inputs.shape[1] :].tolist()


def runs() -> dict[str, list[tuple[str, list[str]]]]:
    """Return methods and their option sets by family; each method goes round the sets by sixes."""
    found: dict[str, list[tuple[str, list[str]]]] = {family: [] for family in FAMILIES}
    place: Counter[str] = Counter()
    for family, method in with_methods(FAMILIES, others=2):
        names = list(OPTIONS)
        if method != "recycling" and not ALL_PAIRS:
            names = [names[(place[method] + step) % len(names)] for step in range(6)]
            place[method] += 6
        found[family].append((method, names))
    return found


RUNS = runs()


def test_every_method_has_every_option_set() -> None:
    met: dict[str, set[str]] = {method: set() for method in METHODS}
    for method, names in chain(*RUNS.values()):
        met[method] |= {*names}
    assert all(names == OPTIONS.keys() for names in met.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_method_gives_what_generate_gives(family: str) -> None:
    model = known(family).build()
    expected = {name: tokens_of(model, options) for name, options in OPTIONS.items()}
    possible = methods_of(model.config)
    for method, names in RUNS[family]:
        if method not in possible:
            continue  # heads that know other families alone
        decode = speculative(method, **required_options(method, model.config))
        for name in names:
            if "sampling" in name and method not in SEEDED:
                continue
            assert tokens_of(model, OPTIONS[name], decode) == expected[name], f"{method}, {name}"


def test_every_option_set_changes_the_text() -> None:
    model = known(FAMILIES[0]).build()
    plain = tokens_of(model, {})
    same = [name for name, options in OPTIONS.items() if tokens_of(model, options) == plain]
    assert same == ["greedy"], "an option without effect proves nothing"
