"""GGUF files as models: the weights and tokens of the folder that they were made of, and what is refused.

Run: pytest tests/model/api/loading/test_gguf.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf as package
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging

from model import SpeculativeDecoder
from model.api.loading import weights
from model.api.loading.weights import read, read_weights
from model.backends.target import TargetModel
from model.methods import METHODS
from tests.model.api.loading.tiny_gguf import TEMPLATE, tiny_llama, tokens, write_gguf
from tests.model.decoded import referee, required_options

pytestmark = pytest.mark.skipif(
    not hasattr(weights.transformers, "GgufConfig"),
    reason="GGUF files need transformers 5.23 or newer",
)
PROMPT = "Tell me about the sea."


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    """The model that the file is made of."""
    return tiny_llama()


@pytest.fixture(scope="module")
def file(llama: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", llama)


def test_the_weights_are_those_that_were_written(file: Path, llama: LlamaForCausalLM) -> None:
    model = read_weights(file, dtype=torch.float32)
    assert not getattr(model, "is_quantized", False)
    assert not hasattr(model.config, "quantization_config")
    expected, found = llama.state_dict(), model.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_read_model_can_be_saved_as_a_folder(file: Path, tmp_path: Path) -> None:
    read_weights(file, dtype=torch.float32).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(model.config, "quantization_config")


def test_a_file_is_parsed_once_and_then_forgotten(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = []

    def counted(path: str) -> Any:
        parsed.append(path)
        return own(path)

    own = package.GGUFReader
    monkeypatch.setattr(package, "GGUFReader", counted)
    for _ in range(2):
        config, _ = read(AutoConfig, file), read(AutoTokenizer, file)
        assert read_weights(file, config=config).config.vocab_size == config.vocab_size
    assert parsed == [str(file)] * 2
    assert package.GGUFReader is counted


def test_a_file_that_has_changed_is_parsed_again(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    """A file without an output head has its embedding for one."""
    for left_out in (None, "output.weight"):
        file = write_gguf(tmp_path / "tiny.gguf", llama, left_out=left_out)
        assert read(AutoConfig, file).tie_word_embeddings == bool(left_out)


def test_the_tokenizer_is_that_of_the_file(file: Path) -> None:
    tokenizer = read(AutoTokenizer, file)
    assert tokenizer.decode(tokenizer(PROMPT, add_special_tokens=False).input_ids) == PROMPT
    assert len(tokenizer) == len(tokens())
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize("method", METHODS)
def test_the_library_gives_the_tokens_of_generate(
    method: str, file: Path, llama: LlamaForCausalLM
) -> None:
    options = required_options(method, llama.config)
    decoder = SpeculativeDecoder.from_pretrained(file, method, torch.float32, **options)
    prompt_ids = decoder.tokenizer(PROMPT).input_ids
    output = decoder.generate(PROMPT, max_new_tokens=40)
    assert output.token_ids == referee(TargetModel(llama), prompt_ids, 40, eos_id=2)
    if method == "recycling":
        assert max(output.accept_lengths) > 1, "nothing was ever accepted"


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got .*none\.gguf; allowed: an existing GGUF file"):
        read(AutoTokenizer, tmp_path / "none.gguf")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match=r"x\.gguf is not a GGUF file: it begins with b'PK"):
        read_weights(tmp_path / "x.gguf")


@pytest.mark.parametrize("missing", weights.PACKAGES)
def test_a_missing_package_is_named(
    missing: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(ValueError, match=rf"need {missing}; pip install {missing}$"):
        read_weights(file)


def test_an_older_transformers_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights.transformers, "__version__", "5.9.1")
    with pytest.raises(ValueError, match=r"need transformers 5\.23 or newer; got 5\.9\.1$"):
        read(AutoTokenizer, file)


def test_an_architecture_that_transformers_does_not_read_is_refused(
    llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "x.gguf", llama, architecture="gizmo")
    with pytest.raises(
        ValueError, match=r"x\.gguf: got architecture gizmo; allowed: bloom, .* olmo2, .* qwen3,"
    ):
        read_weights(file)


def test_a_file_that_lacks_a_tensor_is_refused(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", llama, left_out="blk.1.ffn_up.weight")
    with pytest.raises(ValueError, match=r"lacks 1 weights, .* model\.layers\.1\.mlp\.up_proj"):
        read_weights(file, dtype=torch.float32)


def test_transformers_speaks_as_before_afterwards(file: Path) -> None:
    before = logging.get_verbosity()
    logging.set_verbosity_info()
    try:
        read(AutoTokenizer, file)
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity(before)
