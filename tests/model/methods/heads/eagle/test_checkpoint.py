"""Checkpoints of the published formats load, and every fault of one is named in one line.

Run: pytest tests/model/methods/heads/eagle/test_checkpoint.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from model.methods.heads.eagle.drafter import build_network, open_checkpoint
from model.methods.heads.eagle.network import (
    DraftNetwork,
    Eagle3Network,
    EagleNetwork,
    NetworkShape,
)
from model.methods.heads.head_files import check_embedding
from model.methods.heads.layers import attend_rows
from tests.model.methods.heads.eagle.tiny_heads import (
    HIDDEN,
    config_of,
    eagle3_shapes,
    eagle3_tensors,
    eagle_tensors,
    random_tensors,
    write,
)

VOCAB, DRAFT_VOCAB = 40, 16
Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")


def eagle(folder: Path, change: Callable[[Tensors], Any] = lambda tensors: None) -> str:
    """Write a checkpoint of EAGLE, changed."""
    tensors = eagle_tensors()
    change(tensors)
    return write(folder, config_of(VOCAB), tensors)


def eagle3(folder: Path, change: Callable[[Tensors], Any] = lambda tensors: None) -> str:
    """Write a checkpoint of EAGLE-3, changed."""
    tensors = eagle3_tensors(VOCAB, DRAFT_VOCAB)
    change(tensors)
    return write(folder, config_of(VOCAB, draft_vocab_size=DRAFT_VOCAB), tensors)


@pytest.mark.parametrize("is_bin", [False, True])
def test_both_kinds_of_files_hold_the_same_network(tmp_path: Path, is_bin: bool) -> None:
    tensors = eagle_tensors()
    name = write(tmp_path, config_of(VOCAB), tensors, is_bin)
    network = build_network(open_checkpoint(name, EagleNetwork), CPU, torch.float64)
    loaded = dict(network.named_parameters())
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[key], value.double()) for key, value in tensors.items())


def test_an_own_vocabulary_gives_token_ids(tmp_path: Path) -> None:
    network = build_network(open_checkpoint(eagle3(tmp_path), Eagle3Network), CPU, torch.float32)
    places = torch.tensor([[0, 3], [15, 1]])
    assert network.token_ids(places).tolist() == [[1, 7], [31, 3]]


def test_a_vocabulary_like_the_targets_needs_no_tables(tmp_path: Path) -> None:
    tensors = random_tensors(eagle3_shapes(VOCAB))
    name = write(tmp_path, config_of(VOCAB, draft_vocab_size=VOCAB), tensors)
    network = build_network(open_checkpoint(name, Eagle3Network), CPU, torch.float32)
    assert network.token_ids(torch.tensor([39])).tolist() == [39]


def test_a_head_without_bias_says_so_in_its_config(tmp_path: Path) -> None:
    tensors = eagle_tensors()
    del tensors["fc.bias"]
    name = write(tmp_path, config_of(VOCAB, bias=False), tensors)
    assert not open_checkpoint(name, EagleNetwork).shape.has_fc_bias


def test_a_rewritten_checkpoint_is_read_again(tmp_path: Path) -> None:
    first = open_checkpoint(eagle(tmp_path), EagleNetwork)
    assert open_checkpoint(str(tmp_path), EagleNetwork) is first
    eagle(tmp_path, lambda tensors: tensors["fc.bias"].zero_())
    assert not open_checkpoint(str(tmp_path), EagleNetwork).files.tensors["fc.bias"].any()


def test_a_stored_embedding_must_be_the_targets(tmp_path: Path) -> None:
    embedding = torch.randn(VOCAB, HIDDEN)

    def add(tensors: Tensors) -> None:
        tensors["embed_tokens.weight"] = embedding.half()

    checkpoint = open_checkpoint(eagle(tmp_path, add), EagleNetwork)
    assert "embed_tokens.weight" not in checkpoint.files.tensors
    folder, stored = checkpoint.files.folder, checkpoint.embedding
    check_embedding(folder, stored, embedding)
    check_embedding(folder, stored, embedding.bfloat16())
    with pytest.raises(ValueError, match="were trained for another model"):
        check_embedding(folder, stored, embedding.flip(0))


def drop(name: str) -> Callable[[Tensors], Any]:
    """Drop a tensor."""
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int) -> Callable[[Tensors], Any]:
    """Add or replace a tensor."""
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda at: eagle(at, drop("fc.weight")), EagleNetwork, "the tensor fc.weight is missing"),
        (lambda at: eagle(at, put("fc.scale", 3)), EagleNetwork, "has a tensor fc.scale"),
        (
            lambda at: eagle(at, put("layers.0.self_attn.k_proj.weight", 32, 32)),
            EagleNetwork,
            r"layers.0.self_attn.k_proj.weight has shape \[32, 32\]; allowed: \[16, 32\]",
        ),
        (
            lambda at: eagle(at, put("embed_tokens.weight", 41, HIDDEN)),
            EagleNetwork,
            r"embed_tokens.weight has shape \[41, 32\]; allowed: \[40, 32\]",
        ),
        (lambda at: eagle(at), Eagle3Network, "are of EAGLE or EAGLE-2; allowed: .* EAGLE-3"),
        (lambda at: eagle3(at), EagleNetwork, "are of EAGLE-3; allowed: .* EAGLE or EAGLE-2"),
        (lambda at: eagle3(at, drop("t2d")), Eagle3Network, "the tensor t2d is missing"),
        (
            lambda at: eagle3(at, lambda tensors: tensors["d2t"].add_(1)),
            Eagle3Network,
            "d2t and t2d name different tokens",
        ),
        (
            lambda at: write(at, config_of(VOCAB, num_hidden_layers=2), eagle_tensors()),
            EagleNetwork,
            "num_hidden_layers is 2; allowed: 1",
        ),
        (
            lambda at: write(at, config_of(VOCAB, rope_scaling={"type": "linear"}), {}),
            EagleNetwork,
            "rope_scaling is 'linear'; allowed: 'default'",
        ),
        (
            lambda at: write(at, config_of(VOCAB, target_hidden_size=99), {}),
            EagleNetwork,
            "of 99 for the target model; allowed: the same",
        ),
        (
            lambda at: write(at, config_of(VOCAB) | {"hidden_size": "wide"}, {}),
            EagleNetwork,
            "hidden_size 'wide'; allowed: a positive number",
        ),
        (
            lambda at: write(at, config_of(VOCAB, hidden_layers=[0, "1"]), {}),
            EagleNetwork,
            r"hidden_layers \[0, '1'\]; allowed: a list of layer numbers",
        ),
    ],
)
def test_a_fault_is_named(
    tmp_path: Path, make: Callable[[Path], str], kind: type[DraftNetwork], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        open_checkpoint(make(tmp_path), kind)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model.safetensors": None}, "has no config.json"),
        ({"config.json": "{", "model.safetensors": None}, "config.json cannot be read"),
        ({"config.json": "[]", "model.safetensors": None}, "config.json holds no object"),
        ({"config.json": None}, "has no model.safetensors or pytorch_model.bin"),
        ({"config.json": None, "model.safetensors": "no"}, "model.safetensors cannot be read"),
        ({"config.json": None, "pytorch_model.bin": "no"}, "pytorch_model.bin cannot be read"),
    ],
)
def test_files_that_cannot_be_read_are_named(
    tmp_path: Path, files: dict[str, str | None], message: str
) -> None:
    write(tmp_path, config_of(VOCAB), eagle_tensors())
    if "model.safetensors" not in files:
        (tmp_path / "model.safetensors").unlink()
    if "config.json" not in files:
        (tmp_path / "config.json").unlink()
    for name, text in files.items():
        if text is not None:
            (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(str(tmp_path), EagleNetwork)


class Code:
    """An object whose pickle runs code."""

    ran = False

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return setattr, (Code, "ran", True)


def test_code_in_a_pickle_does_not_run(tmp_path: Path) -> None:
    write(tmp_path, config_of(VOCAB), {}, is_bin=True)
    torch.save({"fc.weight": Code()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin cannot be read"):
        open_checkpoint(str(tmp_path), EagleNetwork)
    assert not Code.ran


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"heads: got 'none'; allowed: a folder with EAGLE or EAGLE-2 heads"
    ):
        open_checkpoint("./none", EagleNetwork)


def speculators(folder: Path, **changes: Any) -> str:
    """Write a checkpoint of EAGLE-3 in the form of the package speculators, with these entries of its config."""
    layer = config_of(VOCAB, model_type="llama", head_dim=8) | changes.pop("layer", {})
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 1],
    }
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in eagle3_tensors(VOCAB, DRAFT_VOCAB).items()
    }
    tensors["verifier_norm.weight"] = torch.ones(HIDDEN)
    return write(folder, config | changes, tensors)


def test_heads_in_the_form_of_speculators_are_the_same_network(tmp_path: Path) -> None:
    (tmp_path / "authors").mkdir()
    own = build_network(
        open_checkpoint(eagle3(tmp_path / "authors"), Eagle3Network), CPU, torch.float32
    )
    (tmp_path / "other").mkdir()
    checkpoint = open_checkpoint(speculators(tmp_path / "other"), Eagle3Network)
    network = build_network(checkpoint, CPU, torch.float32)
    assert checkpoint.shape.hidden_layers == (0, 1, 1) and not checkpoint.shape.has_norms
    mine, theirs = own.state_dict(), network.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_layer_of_speculators_computes_what_the_packages_own_does(tmp_path: Path) -> None:
    """Recorded from its Qwen3DecoderEagle3FirstLayer (speculators at c05b95b): the last state of six rows."""
    recorded = {
        False: [-1.8893420696258545, 0.74641352891922, 2.4068384170532227, -0.1987646073102951],
        True: [-2.0792531967163086, 1.1597790718078613, 2.67822527885437, -0.33001965284347534],
    }
    for norms_residual, expected in recorded.items():
        shape = NetworkShape(
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            norm_eps=1e-5,
            vocab_size=VOCAB,
            draft_vocab_size=VOCAB,
            has_norms=True,
            norms_residual=norms_residual,
        )
        network = Eagle3Network(shape)
        source = torch.Generator().manual_seed(4)
        weights = {
            name: 1 + 0.1 * one if "norm" in name else 0.15 * one
            for name, value in sorted(network.midlayer.state_dict().items())
            for one in [torch.randn(value.shape, generator=source)]
        }
        network.midlayer.load_state_dict(weights)
        embeddings, features = (torch.randn(1, 6, HIDDEN, generator=source)[0] for _ in range(2))
        attend = partial(attend_rows, mask=None, is_causal=True)
        with torch.inference_mode():
            states = network(embeddings, features, torch.arange(6), attend)
        assert states[-1, :4].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "peagle"}, r"its type peagle.*, or its types eagle3"),
        ({"fc_norm": True}, "fc_norm is True; allowed: False"),
        ({"layer": {"attention_bias": True}}, "attention_bias is True; allowed: False"),
    ],
)
def test_what_of_speculators_is_not_supported_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_checkpoint(speculators(tmp_path, **changes), Eagle3Network)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(float("nan"), torch.float32), (float("inf"), torch.float32), (1e5, torch.float16)],
)
def test_weights_that_are_no_numbers_are_refused(
    tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    name = eagle(tmp_path, lambda tensors: tensors["fc.weight"].__setitem__((1, 2), value))
    with pytest.raises(
        ValueError, match=r"fc\.weight has weights that are infinite or not numbers"
    ):
        build_network(open_checkpoint(name, EagleNetwork), CPU, dtype)
