"""Models with hooks, or with functions from outside transformers, give their own text or are refused.

Run: pytest tests/model/backends/proofs/test_own_code.py
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from model import SpeculativeDecoder
from model.api.accelerate import recycling
from model.backends.proofs import self_test as module
from model.backends.proofs.snapshot import OwnCode
from model.backends.proofs.support import UnsupportedModelError
from model.backends.target import TargetModel

PROMPT = [5, 17, 2, 31, 9]
NUM_TOKENS = 16
REFUSED = "its logits differ from its own generation, token by token"
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
CONFIG = LlamaConfig(**SIZES, num_hidden_layers=2, initializer_range=0.3, eos_token_id=None)


def built(kind: type[LlamaForCausalLM] = LlamaForCausalLM, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return kind(CONFIG).eval()


def plain(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    out = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False)
    return out[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


def decoded(decoder: SpeculativeDecoder) -> list[int]:
    return decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS).token_ids


def steered(rows: torch.Tensor, where: Any) -> torch.Tensor:
    rows = rows.clone()
    rows[:, where] += torch.linspace(-3, 3, rows.shape[-1])
    return rows


def hook(where: Any, _: Any, __: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (steered(output[0], where), *output[1:])
    return steered(output, where)


LAST, ALL = partial(hook, -1), partial(hook, slice(None))


def hooked(name: str, function: Callable[..., Any], model: Any) -> Callable[[], object]:
    return model.get_submodule(name).register_forward_hook(function).remove  # type: ignore[no-any-return]


def pre_hooked(model: Any) -> Callable[[], object]:
    def steer(_: Any, inputs: Any) -> Any:
        return (steered(inputs[0], -1),)

    return model.model.layers[1].mlp.register_forward_pre_hook(steer).remove  # type: ignore[no-any-return]


def replaced(where: Any, model: Any) -> Callable[[], object]:
    mlp = model.model.layers[1].mlp
    own = mlp.forward
    mlp.forward = lambda rows: steered(own(rows), where)
    return lambda: vars(mlp).pop("forward")


def hooked_everywhere(model: Any) -> Callable[[], object]:
    mlp = model.model.layers[1].mlp
    steer = lambda one, _, output: steered(output, -1) if one is mlp else None  # noqa: E731
    return register_module_forward_hook(steer).remove


def prepared(model: Any) -> Callable[[], object]:
    own = model.prepare_inputs_for_generation

    def prepare(*arguments: Any, **options: Any) -> Any:
        inputs = own(*arguments, **options)
        return {**inputs, "input_ids": 63 - inputs["input_ids"]}

    model.prepare_inputs_for_generation = prepare
    return lambda: vars(model).pop("prepare_inputs_for_generation")


@pytest.mark.parametrize(
    "change",
    [
        partial(hooked, "model.layers.1", LAST),
        partial(hooked, "lm_head", LAST),
        pre_hooked,
        partial(replaced, -1),
        hooked_everywhere,
        prepared,
    ],
    ids=["layer", "head", "before", "forward", "everywhere", "inputs"],
)
def test_what_acts_on_the_last_position_is_refused_before_and_after_the_first_text(
    change: Callable[[Any], Callable[[], object]],
) -> None:
    model = built()
    expected = plain(model)
    decoder = SpeculativeDecoder(model)
    assert decoded(decoder) == expected
    remove = change(model)
    try:
        assert plain(model) != expected, "the test changes nothing"
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match=REFUSED) as error:
                decoded(decoder)
            assert "\n" not in str(error.value)
        with pytest.raises(UnsupportedModelError, match=REFUSED):
            SpeculativeDecoder(model)
    finally:
        remove()
    assert decoded(decoder) == expected


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        (partial(hooked, "model.layers.1", ALL), torch.float32),
        (partial(hooked, "model.layers.1", ALL), torch.bfloat16),
        (partial(hooked, "lm_head", lambda *_: None), torch.float32),
        (partial(replaced, slice(None)), torch.float32),
    ],
    ids=["layer", "half", "observer", "forward"],
)
def test_what_acts_on_every_position_alike_goes_on_working(
    change: Callable[[Any], Callable[[], object]], dtype: torch.dtype
) -> None:
    """A text's rows that were kept before are read again."""
    model = built().to(dtype)
    decoder = SpeculativeDecoder(model)
    before = decoded(decoder)
    remove = change(model)
    after = decoded(decoder)
    if dtype == torch.float32:
        assert after == plain(model)
    remove()
    assert decoded(decoder) == before


def test_what_acts_on_the_last_position_is_refused_in_half_precision() -> None:
    model = built().to(torch.bfloat16)
    hooked("lm_head", LAST, model)
    with pytest.raises(UnsupportedModelError, match=REFUSED):
        SpeculativeDecoder(model)


class Flipped(LlamaForCausalLM):
    """A class outside transformers that changes the tokens of a step."""

    def prepare_inputs_for_generation(self, *arguments: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(*arguments, **kwargs)
        return {**inputs, "input_ids": 63 - inputs["input_ids"]}


class Inherited(Flipped):
    """A class that only inherits from such a one."""


class Harmless(LlamaForCausalLM):
    """A class whose own function changes nothing."""

    def prepare_inputs_for_generation(self, *arguments: Any, **kwargs: Any) -> Any:
        return dict(super().prepare_inputs_for_generation(*arguments, **kwargs))


@pytest.mark.parametrize("kind", [Flipped, Inherited])
def test_a_class_that_prepares_other_inputs_is_refused(kind: type[LlamaForCausalLM]) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED):
        SpeculativeDecoder(built(kind))


def test_a_class_that_prepares_the_same_inputs_is_proved_and_decodes_within_generate() -> None:
    model = built(Harmless)
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids, max_new_tokens=NUM_TOKENS, do_sample=False, custom_generate=recycling()
    )
    assert out[0, len(PROMPT) :].tolist() == plain(model)


def test_a_model_whose_own_generation_fails_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Harmless, "prepare_inputs_for_generation", lambda *_, **kwargs: 1 / 0)
    with pytest.raises(UnsupportedModelError, match="own generation fails: ZeroDivisionError: div"):
        SpeculativeDecoder(built(Harmless))


def test_a_model_is_proved_again_only_when_its_code_changed(tested: list[TargetModel]) -> None:
    target = TargetModel(built())
    module.prove(target)
    tested.clear()
    with target.hidden_states((-1, 0)).captured():
        target.check_model()  # our own hooks are none
    assert not tested and not OwnCode.of(target.model)
    remove = hooked("lm_head", lambda *_: None, target.model)
    for _ in range(2):
        target.check_model()
    assert len(tested) == 1
    remove()
    target.check_model()
    assert len(tested) == 1, "what was found of it then holds again"


def test_a_model_with_functions_of_its_own_is_freed() -> None:
    model = built()
    replaced(slice(None), model)
    SpeculativeDecoder(model)
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None


class AnyArguments(LlamaForCausalLM):
    """A subclass, as of a tutorial, that names no arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Named(AnyArguments):
    """A subclass of it that names some of them."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids, **kwargs)


@pytest.mark.parametrize("kind", [AnyArguments, Named])
def test_a_forward_that_hands_on_any_arguments_drafts_trees(kind: type[LlamaForCausalLM]) -> None:
    model = built(kind)
    decoder = SpeculativeDecoder(model)
    assert decoded(decoder) == plain(model)
    assert not decoder.target.chain_only


def test_a_wrapper_around_a_models_forward_drafts_trees() -> None:
    model = built()
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    decoder = SpeculativeDecoder(model)
    assert decoded(decoder) == plain(model)
    assert not decoder.target.chain_only


def test_an_encoder_decoder_is_named_within_generate() -> None:
    sizes = {
        "vocab_size": 64,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
    }
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    with pytest.raises(UnsupportedModelError, match="is an encoder-decoder"):
        model.generate(torch.tensor([PROMPT]), max_new_tokens=2, custom_generate=recycling())


class Forgetful(LlamaForCausalLM):
    """A subclass whose forward drops the cache that it takes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("past_key_values", None)
        return super().forward(*args, **kwargs)


def test_a_forward_that_drops_what_it_is_given_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="does not fill a cache"):
        SpeculativeDecoder(built(Forgetful))
