"""The law of `accelerate`: under any options the tokens, scores and pieces equal those of `generate`.

About a hundred option sets, greedy and sampled, on the demo model in float32. Those of several model
families and methods are in `test_custom_generate_laws.py`.

Run: pytest tests/model/api/test_accelerate_laws.py
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from model.api.accelerate import accelerate
from model.api.generate_arguments import BY_NAME
from tests.model.api.test_custom_generate import Pieces, Watch
from tests.model.api.test_decoder import DEMO, PROMPT

NUM_TOKENS = 20
SYNTH = {"keys": [654, 400, 836, 123], "ngram_len": 3}


class Loaded(NamedTuple):
    """The demo model in float32 twice, and its tokenizer."""

    plain: PreTrainedModel
    accelerated: PreTrainedModel
    tokenizer: Any


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """Both models, which no other file changes."""
    plain = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    twin = accelerate(copy.deepcopy(plain))
    return Loaded(plain, twin, AutoTokenizer.from_pretrained(DEMO))


# Settings by name; a function gets the tokenizer and makes an object anew for each call.
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "length": {"max_length": 25, "max_new_tokens": None},
    "no end": {"min_new_tokens": NUM_TOKENS},
    "least": {"min_length": 28, "max_time": 600.0},
    "penalty": {"repetition_penalty": 1.3},
    "prompt penalty": {"encoder_repetition_penalty": 1.4},
    "no pair twice": {"no_repeat_ngram_size": 2},
    "no pair of the prompt": {"encoder_no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[28], [333, 28], [16]]},
    "bias": {"sequence_bias": [[[28], -4.0], [[300], 2.5]]},
    "suppressed": {"suppress_tokens": [28, 300, 16], "begin_suppress_tokens": [499, 692]},
    "forced": {"forced_eos_token_id": 3, "forced_bos_token_id": 5},
    "decay": {"exponential_decay_length_penalty": (5, 1.4)},
    "ends": {"eos_token_id": [16, 28, 300], "pad_token_id": 7},
    "no such end": {"eos_token_id": 8191},
    "finite": {"remove_invalid_values": True, "renormalize_logits": True},
    "prefix": {"prefix_allowed_tokens_fn": lambda *_: lambda batch, ids: range(3, 900)},
    "processor": {"logits_processor": lambda *_: [RepetitionPenaltyLogitsProcessor(1.5)]},
    "criterion": {
        "stopping_criteria": lambda *_: [Watch(24)],
        "return_dict_in_generate": True,
        "output_scores": True,
    },
    "string criterion": {"stopping_criteria": lambda one: [StopStringCriteria(one, ["e"])]},
    "strings": {"stop_strings": ["sea", ".", "an"], "tokenizer": lambda tokenizer: tokenizer},
    "config": {
        "generation_config": lambda *_: GenerationConfig(
            max_new_tokens=15, repetition_penalty=1.2, eos_token_id=[28, 16], pad_token_id=0
        ),
        "max_new_tokens": None,
    },
    "config and call": {
        "generation_config": lambda *_: GenerationConfig(no_repeat_ngram_size=2, pad_token_id=0),
        "repetition_penalty": 1.2,
    },
    "streamer": {"streamer": lambda *_: Pieces()},
    "output": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "unused output": {"output_attentions": True, "output_hidden_states": True},
    "stored": {"cache_implementation": "static", "disable_compile": True},
    "chunks": {"prefill_chunk_size": 4, "low_memory": False},
    "beams that are none": {"num_beams": 1, "early_stopping": False, "length_penalty": 1.0},
    "other modes": {"penalty_alpha": 0.0, "num_return_sequences": 1, "assistant_model": None},
    "assistants": {"num_assistant_tokens": 5, "assistant_confidence_threshold": 0.4},
    "cache": {"use_cache": True, "synced_gpus": False, "trust_remote_code": True},
    "positions": {"position_ids": lambda *_: torch.arange(12)[None]},
    "guided": {"guidance_scale": 1.5},
    "guided away": {
        "guidance_scale": 1.3,
        "negative_prompt_ids": lambda *_: torch.tensor([[1, 333, 28]]),
        "negative_prompt_attention_mask": lambda *_: torch.ones(1, 3, dtype=torch.long),
    },
    "watermark": {"watermarking_config": lambda *_: WatermarkingConfig(bias=3.0)},
    "synthetic": {"watermarking_config": lambda *_: SynthIDTextWatermarkingConfig(**SYNTH)},
}
SAMPLED: dict[str, dict[str, Any]] = {
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.7, "top_k": 0},
    "few": {"top_k": 4},
    "likely": {"top_p": 0.8, "top_k": 0},
    "least likely": {"min_p": 0.1},
    "typical": {"typical_p": 0.7},
    "cut": {"epsilon_cutoff": 0.02},
    "eta": {"eta_cutoff": 0.02},
    "all": {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.1},
}
if "top_h" in vars(GenerationConfig()):
    SAMPLED["entropy"] = {"top_h": 0.5}
# These are added to others in pairs.
ADDED = ("penalty", "no pair twice", "strings", "streamer", "output", "ends")


def sets() -> dict[str, dict[str, Any]]:
    """Return about a hundred option sets by name."""
    found = {f"{name}, greedy": words | {"do_sample": False} for name, words in SETTINGS.items()}
    both = SETTINGS | SAMPLED
    found |= {f"{name}, sampled": words | {"do_sample": True} for name, words in both.items()}
    for place, (name, words) in enumerate(both.items()):
        other = ADDED[place % len(ADDED)]
        if not SETTINGS[other].keys() & words.keys():
            pair = words | SETTINGS[other] | {"do_sample": name in SAMPLED or place % 2 == 1}
            found[f"{name} and {other}"] = pair
    return found


SETS = sets()
# Calls of their own, or nothing to set; `assistant_model` and the like are None or off above.
ELSEWHERE = {
    *("inputs", "input_ids", "attention_mask", "bos_token_id", "custom_generate", "cache_config"),
    *("max_cache_len", "cache_position", "logits_to_keep", "compile_config"),
    *("continuous_batching_config", "diversity_penalty", "num_assistant_tokens_schedule"),
    *("max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind"),
    *("assistant_ensemble_weight", "assistant_tokenizer", "speculation_type"),
    *("decoder_start_token_id", "transformers_version", "use_model_defaults", "top_h"),
}


def test_the_sets_have_every_argument_that_works() -> None:
    used = {name for words in SETS.values() for name in words}
    works = {name for name, one in BY_NAME.items() if one.refused is None} - ELSEWHERE
    assert not works - used
    assert len(SETS) >= 100


def run(model: PreTrainedModel, tokenizer: Any, words: dict[str, Any]) -> dict[str, Any]:
    """Return tokens, scores and streamed pieces of a call."""
    read = tokenizer(PROMPT, return_tensors="pt")
    made = {name: read[name] for name in ("input_ids", "attention_mask")}
    made["max_new_tokens"] = NUM_TOKENS
    for name, value in words.items():
        made[name] = value(tokenizer) if callable(value) else value
    if made["max_new_tokens"] is None:
        del made["max_new_tokens"]
    torch.manual_seed(11)
    found = model.generate(**made)
    streamer = made.get("streamer")
    return {
        "tokens": getattr(found, "sequences", found).tolist(),
        "scores": getattr(found, "scores", None),
        "logits": getattr(found, "logits", None),
        "pieces": (streamer.pieces, streamer.has_ended) if streamer else None,
    }


@pytest.mark.parametrize("name", SETS)
def test_everything_is_as_in_generate(name: str, loaded: Loaded) -> None:
    expected = run(loaded.plain, loaded.tokenizer, SETS[name])
    decode = loaded.accelerated.generate
    decode.steps = []
    found = run(loaded.accelerated, loaded.tokenizer, SETS[name])
    for what in ("tokens", "pieces"):
        assert found[what] == expected[what]
    for what in ("scores", "logits"):
        rows, wanted = found[what], expected[what]
        assert (rows is None) == (wanted is None)
        if rows is not None:
            assert torch.allclose(torch.cat(rows), torch.cat(wanted), atol=1e-3)
    counts_calls = name.startswith(("guided", "synthetic")) and not SETS[name]["do_sample"]
    is_left = counts_calls or "position_ids" in SETS[name]
    assert bool(decode.steps) != is_left, "only these are left to transformers"
