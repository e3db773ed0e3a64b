"""A model that changes between texts is decoded as it is then, by all of its targets.

Run: pytest tests/model/backends/proofs/test_snapshot.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from model.api.accelerate import accelerate
from model.api.decoder import SpeculativeDecoder
from model.backends.proofs.support import UnsupportedModelError
from model.backends.target import TargetModel
from model.kernels import attention, linear
from model.kernels.short_pass import short_pass_kernel
from tests.model.decoded import known, random_ids

PROMPT = random_ids(12, seed=3)
NUM_TOKENS = 10


@pytest.fixture(autouse=True)
def kernels_for_tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    for one in (linear, attention):
        monkeypatch.setattr(one, "FEWEST_WEIGHTS", 0)


def built() -> Any:
    return known("Llama, grouped heads").build()


def plain(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    found = type(model).generate(model, ids, max_new_tokens=NUM_TOKENS, do_sample=False)
    return found[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


def decoded(decoder: SpeculativeDecoder) -> list[int]:
    return decoder.generate(PROMPT, max_new_tokens=NUM_TOKENS).token_ids


def bias(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.bias = nn.Parameter(torch.linspace(-9, 9, 32))


def other_network(model: Any) -> None:
    model.model.layers[0].mlp = type(model.model.layers[0].mlp)(model.config).eval()


def rotation(patch: pytest.MonkeyPatch) -> None:
    own = modeling_llama.apply_rotary_pos_emb

    def rotated(query: Any, key: Any, *rest: Any, **options: Any) -> Any:
        query, key = own(query, key, *rest, **options)
        return -query, key

    patch.setattr(modeling_llama, "apply_rotary_pos_emb", rotated)


CHANGES: dict[str, Callable[[Any], object]] = {
    "bias": bias,
    "network": other_network,
    "eps": lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 100.0),
    "scaling": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 3.0),
    "rotary": lambda model: setattr(model.model.rotary_emb, "attention_scaling", 0.1),
    "activation": lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.Tanh()),
    "dropped": lambda model: model.model.layers.__delitem__(-1),
    "exchanged": lambda model: model.model.layers.insert(0, model.model.layers.pop(-1)),
    "number": lambda model: model.model.embed_tokens.weight.data[PROMPT[2]].neg_(),
    "re-typed": lambda model: setattr(model.model.layers[0].mlp.gate_proj, "__class__", Doubled),
}


class Doubled(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(rows)


@pytest.mark.parametrize("change", [*CHANGES, "function"])
def test_every_target_of_a_model_follows_its_changes(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built()
    decoders = [SpeculativeDecoder(model, method="recycling")]
    decoders += [decoders[0].session(), SpeculativeDecoder(model, method="pld")]
    accelerate(model, method="pld")
    expected = plain(model)
    for decoder in decoders:
        assert decoded(decoder) == expected
        assert not short_pass_kernel() or decoder.target.programs
    rotation(monkeypatch) if change == "function" else CHANGES[change](model)
    after = plain(model)
    assert after != expected, "the test changes nothing"
    ids = torch.tensor([PROMPT])
    for _ in range(2):
        assert [decoded(decoder) for decoder in decoders] == [after] * len(decoders)
        assert model.generate(ids, max_new_tokens=NUM_TOKENS)[0, len(PROMPT) :].tolist() == after


@pytest.fixture
def with_adapters() -> Iterator[tuple[Any, Any]]:
    """A peft model with two adapters, and the model within."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    base = built()
    wrapped = peft.get_peft_model(base, config)
    wrapped.add_adapter("second", config)
    yield wrapped.eval(), base


def test_what_was_found_of_an_adapter_holds_when_it_is_switched_back(
    with_adapters: tuple[Any, Any], tested: list[TargetModel]
) -> None:
    wrapped, base = with_adapters
    first, second = SpeculativeDecoder(wrapped), SpeculativeDecoder(wrapped, method="pld")
    texts = set()
    for turn in range(3):
        for adapter in ("default", "second"):
            wrapped.set_adapter(adapter)
            expected = plain(base)
            texts.add(tuple(expected))
            assert decoded(first) == expected == decoded(second)
        if not turn:
            tested.clear()
    assert len(texts) == 2 and not tested


def test_equal_values_and_other_tensors_of_a_kind_need_no_proof(tested: list[TargetModel]) -> None:
    model = built()
    decoder = SpeculativeDecoder(model)
    decoded(decoder)
    tested.clear()
    model.model.norm.variance_epsilon = float(str(model.model.norm.variance_epsilon))
    model.generation_config.top_k = 7
    layer = model.model.layers[1].self_attn.v_proj
    for change in (lambda one: nn.Parameter(-one), lambda one: nn.Parameter(one.clone())):
        layer.weight = change(layer.weight.detach())
        assert decoded(decoder) == plain(model) and not tested
    accelerate(model)
    tested.clear()
    assert decoded(decoder) == plain(model) and not tested


def test_a_change_that_cannot_be_verified_is_refused_until_it_is_undone() -> None:
    model = built()
    decoder = SpeculativeDecoder(model)
    expected = decoded(decoder)
    norm = model.model.layers[0].input_layernorm
    model.model.layers[0].input_layernorm = Last(norm)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="not lossless") as error:
            decoded(decoder)
        assert "\n" not in str(error.value)
    model.model.layers[0].input_layernorm = norm
    assert decoded(decoder) == expected


class Last(nn.Module):
    """A norm that treats the last row of a pass in a way of its own."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(rows)
        return torch.cat((normed[:, :-1], -normed[:, -1:]), dim=1)


def test_another_number_of_logits_needs_a_new_decoder() -> None:
    model = built()
    decoder = SpeculativeDecoder(model)
    model.lm_head = nn.Linear(32, 70, bias=False)
    with pytest.raises(ValueError, match="got 70 logits; allowed: 67"):
        decoded(decoder)
