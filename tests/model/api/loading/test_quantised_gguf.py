"""GGUF files whose weights stay in their bits: the tokens of the dequantised weights, and what is refused.

Run: pytest tests/model/api/loading/test_quantised_gguf.py
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from model import SpeculativeDecoder
from model.api.loading import weights
from model.api.loading.weights import choose_weights, read_weights
from model.backends.target import TargetModel
from model.commands.model_options import ModelOptions
from model.kernels import attention
from model.kernels.linear import QuantisedEmbedding, QuantisedLinear, num_weights, quantised_weights
from model.kernels.short_pass import short_pass_kernel
from model.methods import METHODS
from tests.model.api.loading.tiny_gguf import LAYERS, tiny_llama, write_gguf
from tests.model.decoded import referee, required_options

pytestmark = pytest.mark.skipif(
    not hasattr(weights.transformers, "GgufConfig"),
    reason="GGUF files need transformers 5.23 or newer",
)
PROMPT = "Tell me about the sea."
KIND = "Q4_1"


@pytest.fixture(scope="module", autouse=True)
def _kernel() -> None:
    if not short_pass_kernel():
        pytest.skip("the kernels cannot be built here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for files."""
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    """A GGUF file with quantised weights."""
    return write_gguf(folder / "tiny.gguf", tiny_llama(), kind=KIND)


@pytest.fixture(scope="module")
def dense(file: Path) -> Any:
    """The same file's model with dequantised weights."""
    return read(file, False)


def read(file: Path, is_native: bool) -> Any:
    """Return the model of a file, in float32."""
    return read_weights(file, "native" if is_native else None, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q4_0", KIND])
def test_weights_stay_quantised_and_are_those_of_the_dequantised_model(
    kind: str, folder: Path
) -> None:
    file = write_gguf(folder / f"{kind}.gguf", tiny_llama(), kind=kind)
    model, dense = read(file, True), read(file, False)
    assert type(model.model.embed_tokens) is QuantisedEmbedding
    assert sum(type(module) is QuantisedLinear for module in model.modules()) == 7 * LAYERS + 1
    assert num_weights(model) == num_weights(dense)
    bytes_of = {"Q8_0": 34, "Q5_0": 22, "Q4_0": 18, "Q4_1": 20}
    matrices = sum(one.numel() for one in dense.parameters() if one.ndim == 2)
    assert sum(one.nbytes for one in quantised_weights(model)) == matrices // 32 * bytes_of[kind]
    expected, found = dense.state_dict(), model.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert not model.is_quantized and not hasattr(model.config, "quantization_config")


def test_a_tied_embedding_is_kept_once(folder: Path) -> None:
    file = write_gguf(folder / "tied.gguf", tiny_llama(), kind=KIND, left_out="output.weight")
    model = read(file, True)
    assert model.lm_head.blocks is model.model.embed_tokens.blocks
    assert len(quantised_weights(model)) == 7 * LAYERS + 1
    assert TargetModel(model).head_share < 1


def test_its_logits_are_those_of_the_dequantised_model(file: Path, dense: Any) -> None:
    ids = torch.randint(3, 200, (1, 40))
    model = read(file, True)
    with torch.no_grad():
        found, expected = model(ids).logits, dense(ids).logits
        torch.testing.assert_close(found, expected)
        # A row's bits do not depend on those beside it.
        layer = model.lm_head
        rows = torch.randn(40, layer.in_features)
        assert torch.equal(layer(rows)[7:8], layer(rows[7:8]))


@pytest.mark.parametrize("method", METHODS)
def test_all_methods_give_the_tokens_of_generate(
    method: str, file: Path, dense: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "FEWEST_WEIGHTS", 0)  # of small models
    options = required_options(method, dense.config)
    decoder = SpeculativeDecoder.from_pretrained(file, method, torch.float32, **options)
    assert decoder.target.linear_kernels.name == "packed-20"
    assert decoder.target.programs.name == f"programs-{LAYERS}"
    prompt_ids = decoder.tokenizer(PROMPT).input_ids
    found = decoder.generate(PROMPT, max_new_tokens=40).token_ids
    assert found == referee(TargetModel(dense), prompt_ids, 40, eos_id=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_whole_numbers_all_methods_give_the_tokens_of_plain_decoding(
    dtype: torch.dtype, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "FEWEST_WEIGHTS", 0)  # of small models
    exact, ids = read(file, True).to(dtype), torch.randint(3, 200, (1, 40))
    model = read_weights(file, "native-int8", dtype=dtype).eval()
    with torch.no_grad():
        found, expected = model(ids).logits, exact(ids).logits
    assert not torch.equal(found, expected), "another arithmetic"
    assert float((found - expected).abs().mean()) < 0.05 * float(expected.std())
    texts = {}
    for method in ("vanilla", "recycling", "pld", "hybrid", "suffix"):
        decoder = SpeculativeDecoder.from_pretrained(file, method, dtype, weights="native-int8")
        assert decoder.target.linear_kernels.name.endswith("packed-20-int8")
        assert decoder.target.programs.name == f"programs-{LAYERS}"
        texts[method] = decoder.generate(ids, max_new_tokens=60).token_ids
    assert all(text == texts["vanilla"] for text in texts.values())
    assert num_weights(model) == num_weights(exact)
    assert all(
        torch.equal(one, exact.state_dict()[name]) for name, one in model.state_dict().items()
    )


def test_a_quantised_model_can_be_cast_copied_and_saved(
    file: Path, dense: Any, tmp_path: Path
) -> None:
    model = copy.deepcopy(read(file, True)).bfloat16()
    assert model.lm_head.weight.dtype == model.dtype == torch.bfloat16
    assert model(torch.tensor([[5, 6]])).logits.dtype == torch.bfloat16
    read(file, True).save_pretrained(tmp_path)
    saved = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(saved[name], one) for name, one in dense.state_dict().items())


def test_other_weights_cannot_be_loaded_into_a_quantised_model(file: Path, dense: Any) -> None:
    model = read(file, True)
    with pytest.raises(
        RuntimeError, match=r"weights are quantised and cannot be replaced; allowed: "
    ):
        model.load_state_dict(dense.state_dict(), strict=False)


def test_auto_is_native_where_the_kernel_reads_the_file(file: Path, folder: Path) -> None:
    assert choose_weights(file, "auto", "cpu", torch.float32, {}) == "native"
    assert choose_weights(file, "auto", "cpu", "auto", {}) == "native"
    assert choose_weights(file, "auto", "meta", torch.float32, {}) == "dequantised"
    assert choose_weights(file, "auto", "cpu", torch.float64, {}) == "dequantised"
    plain = write_gguf(folder / "plain.gguf", tiny_llama())
    assert choose_weights(plain, "auto", "cpu", torch.float32, {}) == "dequantised"
    assert choose_weights(folder, "auto", "cpu", torch.float32, {}) is None


def test_native_is_refused_where_it_cannot_be(file: Path, folder: Path) -> None:
    plain = write_gguf(folder / "plain.gguf", tiny_llama())
    for place, device, dtype, match in (
        (file, "meta", torch.float32, "got native on meta; allowed: on a CPU"),
        (file, "cpu", torch.float64, "in torch.float64; allowed: in float32, bfloat16"),
        (plain, "cpu", torch.float32, "has no such weights; allowed: with weights of Q4_0"),
        (
            folder,
            "cpu",
            torch.float32,
            "allowed: only with a GGUF file or a model that torchao quantised",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            choose_weights(place, "native", device, dtype, {})
    with pytest.raises(ValueError, match="weights"):
        choose_weights(file, "packed", "cpu", torch.float32, {})


def test_native_needs_its_kernel(file: Path) -> None:
    with pytest.raises(ValueError, match=r"weights: got native with .*; leave one of them out"):
        ModelOptions(model_path=str(file), weights="native", kernels="off")
