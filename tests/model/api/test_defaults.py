"""What the library decodes with where nothing is named.

Run: pytest tests/model/api/test_defaults.py
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from model import SpeculativeDecoder, TokenRecycling
from model.api.defaults import default_choice, paying_options
from model.methods.hybrid.candidate_pool import library_of_pool
from model.methods.recycling.auto_tree import library_of_guesses
from tests.model.decoded import known

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LLAMA = "Llama, grouped heads"


def test_the_default_is_what_pays_on_the_device() -> None:
    model = known(LLAMA).build()
    decoder = SpeculativeDecoder(model)
    assert (decoder.method, decoder.drafter.config.budget) == ("hybrid", "auto")
    assert TokenRecycling(model).drafter.config.tree_version == "auto"
    assert default_choice(GPU)[:2] == ("recycling-averaged", {}), "the paper's tree"
    assert paying_options("recycling", {}, GPU) == {}
    assert paying_options("pld", {}, CPU) == {"budget": "auto"}
    assert paying_options("suffix", {}, CPU) == {}, "it has no automatic number of nodes"


def test_what_is_named_is_used_as_it_is() -> None:
    model = known(LLAMA).build()
    assert SpeculativeDecoder(model, method="recycling").drafter.config.tree_version == "2.2.2"
    paper = TokenRecycling(model, tree_version="2.2.2", output_id_topk=9)
    assert (paper.drafter.config.tree_version, paper.drafter.config.output_id_topk) == ("2.2.2", 9)
    assert TokenRecycling(model, output_id_topk=9).drafter.config.tree_version == "auto"
    assert TokenRecycling(model, policy="original").drafter.config.tree_version == "2.2.2"
    with pytest.raises(ValueError, match="got output_id_topk without a method"):
        SpeculativeDecoder(model, output_id_topk=9)
    with pytest.raises(ValueError, match="output_id_topk: got 0"):
        TokenRecycling(model, output_id_topk=0)


def test_token_recycling_is_that_method_alone(tmp_path: Path) -> None:
    said = r"^method: got 'pld'; allowed: none, this decoder's is recycling; SpeculativeDecoder\(.*"
    with pytest.raises(ValueError, match=said):
        TokenRecycling(known(LLAMA).build(), method="pld")
    with pytest.raises(ValueError, match=said):  # before the weights load
        TokenRecycling.from_pretrained(tmp_path, "pld")


def test_without_a_compiler_the_default_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    caplog.set_level(logging.INFO)
    library_of_pool.cache_clear()
    library_of_guesses.cache_clear()
    try:
        assert default_choice(CPU)[:2] == ("pld", {"budget": "auto"})
        assert paying_options("recycling", {}, CPU) == {}
    finally:
        library_of_pool.cache_clear()
        library_of_guesses.cache_clear()
    assert "pld instead of hybrid: no C++ compiler: got no-such-compiler" in caplog.text
    assert "building" not in caplog.text, "nothing is built without a compiler"
    assert "recycling: uses its fixed number of nodes, which is slow on a CPU" in caplog.text
