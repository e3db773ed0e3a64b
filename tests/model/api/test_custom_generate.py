"""`custom_generate`: outputs, state between calls, refusals.

`test_custom_generate_laws.py` tests that tokens equal those of `generate`.

Run: pytest tests/model/api/test_custom_generate.py
"""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import model.engine.read_out
from model.api.accelerate import (
    Speculative,
    accelerate,
    generate_from_folder,
    recycling,
    speculative,
)
from model.backends.proofs.support import cache_argument
from model.methods import METHODS
from tests.model.api.test_decoder import PROMPT, demo
from tests.model.decoded import SEEDED, known, random_ids, required_options
from tests.model.engine.test_near_ties import model_with_twins
from tests.model.families.family import VOCAB
from tests.pairs import pairs

LLAMA = "Llama, grouped heads"
IDS = torch.tensor([random_ids(12, seed=8)])
PLAIN = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 20}


@lru_cache(maxsize=1)
def llama() -> PreTrainedModel:
    """Return a random Llama."""
    return known(LLAMA).build()


def method_of(name: str, model: PreTrainedModel | None = None) -> Speculative:
    """Return a method's callable, for a model."""
    return speculative(name, **required_options(name, (model or llama()).config))


@pytest.mark.parametrize(("method", "do_sample"), pairs(SEEDED, [False, True]))
def test_scores_and_logits_are_those_of_generate(method: str, do_sample: bool) -> None:
    options = PLAIN | {
        "do_sample": do_sample,
        "repetition_penalty": 1.3,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    decode = method_of(method)  # draws the weights of a draft model or heads, if it is the first
    torch.manual_seed(0)
    expected = llama().generate(IDS, **options)
    torch.manual_seed(0)
    found = llama().generate(IDS, **options, custom_generate=decode)
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        rows, wanted = getattr(found, name), getattr(expected, name)
        assert [row.shape for row in rows] == [(1, VOCAB)] * 20
        assert torch.allclose(torch.cat(rows), torch.cat(wanted), atol=1e-3)
    assert getattr(found, cache_argument(llama())) is None
    assert found.hidden_states is None
    assert not torch.allclose(torch.cat(found.scores), torch.cat(found.logits), atol=1e-3)


def test_scores_that_were_not_asked_for_are_not_kept() -> None:
    found = llama().generate(
        IDS, **PLAIN, return_dict_in_generate=True, custom_generate=recycling()
    )
    assert found.scores is None and found.logits is None


def test_tensors_that_leave_a_call_may_be_written_and_derived() -> None:
    given: list[torch.Tensor] = []

    class Keeping(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            given.append(input_ids)
            return torch.zeros(1, dtype=torch.bool)

    found = llama().generate(
        IDS,
        **PLAIN,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        stopping_criteria=StoppingCriteriaList([Keeping()]),
        custom_generate=recycling(),
    )
    for tensor in (found.sequences, *found.scores, *found.logits, *given):
        tensor[0, 0] = 0
    factor = torch.ones(1, requires_grad=True)
    (torch.cat(found.logits) * factor + found.scores[0] * factor).sum().backward()
    assert factor.grad is not None and not found.scores[0].requires_grad


class Watch(StoppingCriteria):
    """Records the texts it is asked about; ends the text at a length."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[list[int]] = []
        self.num_scores: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return whether the text has reached that length [1]."""
        self.asked.append(input_ids[0].tolist())
        self.num_scores.append(len(scores))
        return torch.tensor([input_ids.shape[1] >= self.length])


@pytest.mark.parametrize("method", METHODS)
def test_criteria_see_every_token_once_in_order(method: str) -> None:
    inputs = torch.cat((torch.zeros(1, 2, dtype=torch.long), IDS), dim=1)
    options = {
        "attention_mask": (torch.arange(14) >= 2).long()[None],
        "max_new_tokens": 20,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    watches = [Watch(24), Watch(24)]
    texts = [
        llama().generate(
            inputs, **options, stopping_criteria=StoppingCriteriaList([watch]), custom_generate=one
        )
        for watch, one in zip(watches, (None, method_of(method)), strict=True)
    ]
    assert texts[0].sequences.tolist() == texts[1].sequences.tolist()
    assert watches[0].asked == watches[1].asked and len(watches[1].asked) == 10
    assert watches[0].num_scores == watches[1].num_scores


def test_the_reason_to_stop_is_said() -> None:
    decode = recycling()
    criteria = StoppingCriteriaList([Watch(16)])
    options = {"return_dict_in_generate": True, "output_scores": True}
    llama().generate(IDS, **PLAIN, **options, stopping_criteria=criteria, custom_generate=decode)
    assert decode.steps[-1].stop_reason == "criteria" and sum(decode.accept_lengths) == 4
    llama().generate(IDS, **PLAIN, custom_generate=decode)
    assert decode.steps[-1].stop_reason == "length" and sum(decode.accept_lengths) == 20


class Pieces(BaseStreamer):
    """Collects the tokens it is given."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.has_ended = False

    def put(self, value: torch.Tensor) -> None:
        """Take tokens."""
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        """Note the end."""
        self.has_ended = True


def test_a_streamer_gets_the_prompt_and_then_every_step() -> None:
    decode, streamer = recycling(), Pieces()
    found = llama().generate(IDS, **PLAIN, custom_generate=decode, step_streamer=streamer)
    assert streamer.has_ended
    assert streamer.pieces[0] == IDS[0].tolist()
    assert [len(piece) for piece in streamer.pieces[1:]] == decode.accept_lengths
    assert [token for piece in streamer.pieces for token in piece] == found[0].tolist()
    assert max(decode.accept_lengths) > 1


def test_matrix_and_rows_live_from_call_to_call() -> None:
    decode = recycling()
    first = llama().generate(IDS, **PLAIN, custom_generate=decode)
    steps = len(decode.steps)
    again = llama().generate(IDS, **PLAIN, custom_generate=decode)
    assert torch.equal(first, again)
    assert len(decode.steps) < steps, "the second time it should know the text"
    decode.reset()
    llama().generate(IDS, **PLAIN, custom_generate=decode)
    assert len(decode.steps) == steps


def test_stop_strings_need_the_tokenizer_of_the_callable() -> None:
    network, tokenizer = demo()
    inputs = tokenizer(PROMPT, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    options = {"max_new_tokens": 40, "do_sample": False}
    text = tokenizer.decode(network.generate(**inputs, **options)[0, inputs.input_ids.shape[1] :])
    stop = text[8:12]
    expected = network.generate(**inputs, **options, stop_strings=stop, tokenizer=tokenizer)
    decode = recycling(tokenizer)
    found = network.generate(**inputs, **options, stop_strings=stop, custom_generate=decode)
    assert torch.equal(found, expected)
    assert decode.steps[-1].stop_reason == "criteria"
    with pytest.raises(ValueError, match="stop_strings: got strings without a tokenizer"):
        network.generate(**inputs, **options, stop_strings=stop, custom_generate=recycling())


def test_padding_and_prompts_of_one_token() -> None:
    one = torch.tensor([[9]])
    options = {"max_new_tokens": 25, "attention_mask": torch.ones_like(one)}
    expected = llama().generate(one, **options)
    assert torch.equal(llama().generate(one, **options, custom_generate=recycling()), expected)
    padded = torch.tensor([[0, 0, 0, 9]])
    options["attention_mask"] = torch.tensor([[0, 0, 0, 1]])
    found = llama().generate(padded, **options, custom_generate=recycling())
    assert torch.equal(found[:, 3:], expected)


def num_differing() -> int:
    """Count texts with a penalty that differ from those of `generate`, in models full of near-ties."""
    count = 0
    for seed in range(2):
        target = model_with_twins(seed, 2)
        ids = torch.tensor([random_ids(20, seed=seed, vocab_size=64)])
        # Penalties below 1 favour repeated tokens: twins stay twins.
        options = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": 20,
            "repetition_penalty": 0.9,
            "pad_token_id": 0,
        }
        expected = target.model.generate(ids, **options, custom_generate=method_of("vanilla"))
        for method in METHODS:
            decode = method_of(method, target.model)
            found = target.model.generate(ids, **options, custom_generate=decode)
            count += not torch.equal(found, expected)
    return count


def test_near_ties_of_processed_scores_fall_as_in_plain_decoding() -> None:
    assert num_differing() == 0


def test_without_the_rule_they_fall_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.engine.read_out, "TIE_STEPS", 0)
    assert num_differing() > 0, "without the rule nothing differs: the test above proves nothing"


def filled_cache() -> DynamicCache:
    """Return a cache with rows."""
    cache = DynamicCache(config=llama().config)
    llama()(IDS[:, :5], **{cache_argument(llama()): cache})
    return cache


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams: got 2; allowed: greedy decoding or sampling"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens: got 3; allowed: none"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences: got 2; allowed: 1"),
        ({"use_cache": False}, "use_cache: got False"),
        pytest.param(
            {"cache_implementation": "offloaded"},
            "cache_implementation: got offloaded",
            marks=pytest.mark.skipif(
                bool(torch.version.cuda) and not torch.cuda.is_available(),
                reason="transformers makes this cache first, which needs the GPU torch was built for",
            ),
        ),
        (
            {"return_dict_in_generate": True, "output_attentions": True},
            "output_attentions: got True; allowed",
        ),
        ({"past_key_values": filled_cache}, "past_key_values: got a DynamicCache"),
        ({"attention_mask": (torch.arange(12) < 9).long()[None]}, "allowed: padding on the left"),
        (
            {"position_ids": torch.arange(12)[None] + 3},
            "position_ids: got shape .*allowed: none, they",
        ),
        ({"guidance_scale": 1.5}, "guidance_scale: got 1.5; allowed: with do_sample=True"),
        ({"inputs_embeds": torch.zeros(1, 12, 32)}, "inputs_embeds"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options: dict[str, Any], message: str) -> None:
    options = {name: value() if callable(value) else value for name, value in options.items()}
    with pytest.raises(ValueError, match=message):
        llama().generate(IDS, **(PLAIN | options), custom_generate=recycling())


def test_inputs_that_another_prepares_are_refused() -> None:
    model = known(LLAMA).build()
    stock = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **kwargs: stock(*args, **kwargs)
    with pytest.raises(ValueError, match="model: its prepare_inputs_for_generation was replaced"):
        model.generate(IDS, **PLAIN, custom_generate=recycling())
    model.prepare_inputs_for_generation = stock  # as peft puts it back
    model.generate(IDS, **PLAIN, custom_generate=recycling())


def test_guidance_holds_with_sampling() -> None:
    texts = []
    for decode in (None, recycling()):
        torch.manual_seed(3)
        options = PLAIN | {"do_sample": True, "guidance_scale": 1.5}
        texts.append(llama().generate(IDS, **options, custom_generate=decode))
    assert torch.equal(*texts)


def test_a_callable_serves_one_model() -> None:
    decode = recycling()
    llama().generate(IDS, **PLAIN, custom_generate=decode)
    with pytest.raises(ValueError, match="got another model than at its first call"):
        known(LLAMA).build(seed=1).generate(IDS, **PLAIN, custom_generate=decode)


def test_what_was_learned_is_saved_and_loaded(tmp_path: Path) -> None:
    file = tmp_path / "learned.safetensors"
    decode = recycling()
    with pytest.raises(
        ValueError, match=r"save_memory: got no call yet, .*allowed: after the first call"
    ):
        decode.save_memory(file)
    with pytest.raises(FileNotFoundError, match=r"load_memory: got .*, which is not a file"):
        decode.load_memory(file)
    llama().generate(IDS, **PLAIN, custom_generate=decode)
    num_steps = len(decode.steps)
    decode.save_memory(file)
    decode.reset()
    decode.load_memory(file)
    fresh = recycling()
    fresh.load_memory(file)  # kept until there is a decoder
    for one in (decode, fresh):
        llama().generate(IDS, **PLAIN, custom_generate=one)
        assert len(one.steps) < num_steps, "it should know the text"
    other = recycling(output_id_topk=9)
    other.load_memory(file)
    for _ in range(2):
        # At every call, as nothing else was asked for.
        with pytest.raises(ValueError, match="int32 of shape"):
            llama().generate(IDS, **PLAIN, custom_generate=other)
    other.reset()
    llama().generate(IDS, **PLAIN, custom_generate=other)


def test_a_callable_says_what_it_is() -> None:
    decode = speculative("pld", num_pred_tokens=4)
    assert repr(decode) == "<speculative('pld', num_pred_tokens=4), no call yet>"
    llama().generate(IDS, **PLAIN, custom_generate=decode)
    assert repr(decode) == "<speculative('pld', num_pred_tokens=4), on a LlamaForCausalLM>"


@pytest.mark.parametrize("way", ["callable", "accelerate"])
def test_several_threads_share_one(way: str) -> None:
    model, tokenizer = known(LLAMA).build(), demo()[1]
    prompts = [torch.tensor([random_ids(12 + seed, seed=seed)]) for seed in range(4)]
    words = {"max_new_tokens": 20, "do_sample": False}
    calls = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} | words for ids in prompts]
    expected = [model.generate(**call) for call in calls]
    own = {"custom_generate": recycling(tokenizer)} if way == "callable" else {}
    if not own:
        accelerate(model, tokenizer)
    made = [call | own | {"streamer": Pieces()} for call in calls]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            found = list(pool.map(lambda call: model.generate(**call), made))
            assert all(map(torch.equal, found, expected))
    for call, tokens in zip(made, expected, strict=True):
        pieces = [token for piece in call["streamer"].pieces for token in piece]
        assert pieces == 2 * tokens[0].tolist()


def test_a_copied_model_begins_anew() -> None:
    model, _ = demo()
    ids = torch.tensor([random_ids(20)])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    expected = generate_from_folder(model, ids, **options)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.__dict__["_speculative"].decoder is None
        with torch.no_grad():
            other.lm_head.weight.mul_(-1)
        ours = generate_from_folder(other, ids, **options)
        assert torch.equal(ours, other.generate(ids, **options)) and not torch.equal(ours, expected)
    assert torch.equal(generate_from_folder(model, ids, **options), expected)


def test_options_of_a_method_reach_it_and_are_checked() -> None:
    decode = recycling(output_id_topk=9)
    llama().generate(IDS, **PLAIN, custom_generate=decode)
    assert decode.decoder is not None
    assert decode.decoder.drafter.memory()["adjacency"].shape == (VOCAB, 9)
    with pytest.raises(ValueError, match="option of pld: got 'ngrams'"):
        llama().generate(IDS, **PLAIN, custom_generate=speculative("pld", ngrams=3))


def test_processors_are_asked_once_a_token_when_drawn() -> None:
    asked: list[int] = []

    class Counting(RepetitionPenaltyLogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            asked.append(input_ids.shape[1])
            return super().__call__(input_ids, scores)

    options = PLAIN | {"do_sample": True, "logits_processor": [Counting(1.2)]}
    llama().generate(IDS, **options, custom_generate=recycling())
    assert asked == list(range(12, 32))
