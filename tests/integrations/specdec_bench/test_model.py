"""The model for specdec_bench gives it the steps of this library, in its form.

Run: pytest tests/integrations/specdec_bench/test_model.py
"""

from __future__ import annotations

import asyncio
import sys

import pytest

import model
from tests.model.api.test_decoder import decoder_for, demo


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """The adapter's module; a checkout has the library under another name."""
    monkeypatch.setitem(sys.modules, "token_recycling", model)
    import token_recycling_specdec_bench

    return token_recycling_specdec_bench


def test_steps_come_as_chunks_with_times_and_without_the_end(adapter, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    decoder = decoder_for("pld", *demo())
    monkeypatch.setattr(adapter.SpeculativeDecoder, "from_pretrained", lambda *_, **__: decoder)
    bench = adapter.TokenRecyclingModel("data/demo/model", 1, {"temperature": 0}, method="pld")
    prompt = decoder.tokenizer("USER: Tell me of a boat. ASSISTANT:").input_ids
    steps = [step.tokens for step in decoder.steps(prompt, max_new_tokens=30)]
    expected = [token for step in steps for token in step]
    # A token in the middle, as if it ended the text.
    end = expected[12]
    length = expected.index(end)
    for end_id, count in ((-1, 30), (end, length)):
        out = asyncio.run(bench.run(prompt, 30, end_id, request_id=0, turn_id=0))
        (chunks,) = out["output_ids"]
        assert [token for chunk in chunks for token in chunk] == expected[:count]
        assert all(chunks)
        assert len(out["token_times"]) == 1 + len(chunks)
        assert out["token_times"] == sorted(out["token_times"])
    lengths = [
        len(chunk) for chunk in asyncio.run(bench.run(prompt, 30, -1, 0, 0))["output_ids"][0]
    ]
    assert lengths == [len(step) for step in steps]
    assert bench.get_serving_config()["method"] == "pld"


def test_what_it_cannot_do_is_refused(adapter) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="concurrency: got 2; allowed: 1"):
        adapter.TokenRecyclingModel("x", 2)
    with pytest.raises(ValueError, match="temperature: got sampling"):
        adapter.TokenRecyclingModel("x", 1, {"temperature": 0.5})
