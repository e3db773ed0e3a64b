"""The list of `generate`'s arguments: complete for this version of transformers, and what decides.

Run: pytest tests/model/api/test_generate_arguments.py
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderNoRepeatNGramLogitsProcessor,
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from model.api.generate_arguments import ARGUMENTS, BY_NAME, UnsupportedCallError, check, table
from model.api.prepared_call import PreparedCall
from tests.model.decoded import known

IDS = torch.tensor([[5, 6, 7, 8]])
TWO = torch.cat((IDS, IDS))
LLAMA = known("Llama, grouped heads").build()
GUIDED = LogitsProcessorList([UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, LLAMA)])
OF_PROMPTS = LogitsProcessorList([EncoderNoRepeatNGramLogitsProcessor(2, IDS)])
ENDS = StoppingCriteriaList([MaxLengthCriteria(9), EosTokenCriteria(2)])
IN_OUTPUT = {"return_dict_in_generate": True}
# For every argument that is refused at some value, such a call: settings, other arguments, processors.
REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 2},
    "num_beam_groups": {"num_beam_groups": 2},
    "constraints": {"constraints": [object()]},
    "force_words_ids": {"force_words_ids": [[5]]},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "high"},
    "assistant_model": {"assistant_model": LLAMA},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "use_mtp": {"use_mtp": True},
    "is_assistant": {"is_assistant": True},
    "num_return_sequences": {"num_return_sequences": 2},
    "inputs": {"inputs": IDS[None]},
    "input_ids": {"input_ids": IDS[None]},
    "attention_mask": {"attention_mask": torch.tensor([[1, 1, 0, 1]])},
    "position_ids": {"position_ids": torch.tensor([[1, 2, 3, 4]])},
    "past_key_values": {"past_key_values": DynamicCache(), "given": {"past_key_values"}},
    "cache": {"cache": DynamicCache(), "given": {"cache"}},
    "cache_params": {"cache_params": DynamicCache(), "given": {"cache_params"}},
    "use_cache": {"use_cache": False},
    "cache_implementation": {"cache_implementation": "quantized"},
    "output_attentions": {"output_attentions": True} | IN_OUTPUT,
    "output_hidden_states": {"output_hidden_states": True} | IN_OUTPUT,
    "return_legacy_cache": {"return_legacy_cache": True} | IN_OUTPUT,
    "guidance_scale": {"guidance_scale": 1.5, "processors": GUIDED},
    "watermarking_config": {"watermarking_config": {}, "processors": GUIDED},
    "logits_processor": {"processors": GUIDED},
    "token_healing": {"token_healing": True},
    "synced_gpus": {"synced_gpus": True},
}
# The same with two prompts, for every argument that is refused there alone.
IN_BATCH: dict[str, dict[str, Any]] = {
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.2, "processors": OF_PROMPTS},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2, "processors": OF_PROMPTS},
    "logits_processor": {"processors": LogitsProcessorList([lambda ids, scores: scores])},
    "stopping_criteria": {"criteria": StoppingCriteriaList([MaxTimeCriteria(9.0)])},
    "streamer": {"streamer": object()},
    "do_sample": {"do_sample": True},
    "output_scores": {"output_scores": True} | IN_OUTPUT,
    "output_logits": {"output_logits": True} | IN_OUTPUT,
    "pad_token_id": {"criteria": StoppingCriteriaList([MaxLengthCriteria(9)])},
}


def call_of(
    input_ids: torch.Tensor = IDS,
    processors: LogitsProcessorList | None = None,
    criteria: StoppingCriteriaList = ENDS,
    given: set[str] | None = None,
    **words: Any,
) -> PreparedCall:
    """Return a call as transformers would prepare it."""
    config = GenerationConfig()
    arguments = {}
    for name, value in words.items():
        if hasattr(config, name):
            setattr(config, name, value)
        else:
            arguments[name] = value
    processors = processors if processors is not None else LogitsProcessorList()
    given = frozenset(given or ())
    return PreparedCall(LLAMA, input_ids, processors, criteria, config, arguments, given)


def test_every_argument_of_this_version_is_listed_once() -> None:
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    parameters = {*inspect.signature(GenerationMixin.generate).parameters} - {"self", "kwargs"}
    taken = {"tokenizer", "assistant_tokenizer", "trust_remote_code"}  # from its **kwargs
    added = (fields | parameters | taken) - BY_NAME.keys()
    assert not added, f"say in model/api/generate_arguments.py what they do here: {sorted(added)}"
    assert len(BY_NAME) == sum(len(one.names.split()) for one in ARGUMENTS)


def test_every_argument_that_may_be_refused_is() -> None:
    check(call_of())
    may_be = {name for name, one in BY_NAME.items() if one.refused is not None}
    assert may_be == REFUSED.keys()
    assert all(BY_NAME[name].allowed for name in may_be)
    check(call_of(TWO))
    may_be = {name for name, one in BY_NAME.items() if one.refused_in_batch is not None}
    assert may_be == IN_BATCH.keys()
    assert all(BY_NAME[name].allowed_in_batch for name in may_be)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(name: str) -> None:
    with pytest.raises(UnsupportedCallError, match=rf"^{name}: got .+; allowed: ") as caught:
        check(call_of(**REFUSED[name]))
    assert caught.value.argument == name and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", IN_BATCH)
def test_what_is_refused_with_several_prompts_is_named(name: str) -> None:
    check(call_of(**IN_BATCH[name]))
    words = rf"^{name}: got .+ with 2 prompts; allowed: .+, or one prompt$"
    with pytest.raises(UnsupportedCallError, match=words) as caught:
        check(call_of(TWO, **IN_BATCH[name]))
    assert caught.value.argument == name


@pytest.mark.parametrize(
    "words",
    [
        {"num_beams": 1, "num_return_sequences": 1, "penalty_alpha": 0.6, "top_k": 1},
        {"output_attentions": True, "cache_implementation": "static", "prefill_chunk_size": 4},
        {"guidance_scale": 1.5, "processors": GUIDED, "do_sample": True},
        {
            "position_ids": torch.tensor([[0, 0, 1, 2]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1]]),
        },
        {"past_key_values": DynamicCache(), "synced_gpus": False, "assistant_model": None},
    ],
)
def test_values_that_mean_nothing_special_are_not_refused(words: dict[str, Any]) -> None:
    check(call_of(**words))


def test_other_arguments_and_modes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UnsupportedCallError, match=r"inputs_embeds: got shape \[1, 4, 8\]; allowed"
    ):
        check(call_of(inputs_embeds=torch.zeros(1, 4, 8)))
    call = call_of(num_beams=3)
    # As of a setting that the list does not know yet. A copy: the order of the list matters.
    others = {name: one for name, one in BY_NAME.items() if name != "num_beams"}
    monkeypatch.setattr("model.api.generate_arguments.BY_NAME", others)
    with pytest.raises(UnsupportedCallError, match="generate: got beam_search; allowed: greedy"):
        check(call)


def test_the_table_has_every_argument() -> None:
    rows = table().splitlines()[2:]
    assert len(rows) == len(ARGUMENTS) and all(row.count(" | ") == 1 for row in rows)
    for name in BY_NAME:
        assert sum(f"`{name}`" in row.split(" | ")[0] for row in rows) == 1, name
