"""A conversation: every turn equals plain decoding after the same messages.

Run: pytest tests/model/chat/test_dialogue.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from model.api.decoder import SpeculativeDecoder
from model.backends.passes.cache import TreeCache
from model.backends.passes.prefix_cache import PrefixCache
from model.chat.dialogue import Dialogue, render
from model.engine.loop import generate
from model.methods import METHODS, drafter_class
from model.methods.hybrid.candidate_pool import library_of_pool
from tests.model.decoded import drafter_for

DEMO = Path(__file__).resolve().parents[3] / "data/demo/model"
LIMIT = 16
# The others need a second model, heads or a datastore.
WITH_DEFAULTS = [
    method for method in METHODS for cls in [drafter_class(method)] if not cls.drafts_with()
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """The demo model in float32."""
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.fixture
def dialogue(model: PreTrainedModel) -> Dialogue:
    """A fresh conversation, recycling."""
    decoder = SpeculativeDecoder(model, AutoTokenizer.from_pretrained(DEMO), "recycling")
    return Dialogue(decoder, max_new_tokens=LIMIT)


def expected(dialogue: Dialogue, text: str) -> list[int]:
    """Return plain decoding's tokens for the next message, from a cache of their own."""
    decoder = dialogue.decoder
    prompt = render(decoder.tokenizer, [*dialogue.messages, {"role": "user", "content": text}])
    plain = drafter_for("vanilla", decoder.target)
    eos_ids = decoder.eos_ids
    answer = generate(decoder.target, plain, prompt, max_new_tokens=LIMIT, eos_ids=eos_ids)
    return answer.token_ids


def ask(dialogue: Dialogue, text: str) -> list[int]:
    """Return the tokens of a whole answer."""
    return [token for piece in dialogue.answer(text) for token in piece.token_ids]


def test_every_turn_with_any_method_is_plain_decodings(dialogue: Dialogue) -> None:
    for turn, method in enumerate([*WITH_DEFAULTS, "recycling"]):
        dialogue.use(method)
        text = f"Tell me story {turn}."
        plain = expected(dialogue, text)
        assert ask(dialogue, text) == plain, method
    roles = [message["role"] for message in dialogue.messages]
    assert roles == ["user", "assistant"] * (len(WITH_DEFAULTS) + 1)


def test_a_turn_reads_only_what_is_new(dialogue: Dialogue, monkeypatch: pytest.MonkeyPatch) -> None:
    def spy(cache: PrefixCache, *arguments: Any) -> TreeCache:
        opened = original(cache, *arguments)
        num_known.append(opened.length)
        return opened

    original = PrefixCache.open
    num_known: list[int] = []
    monkeypatch.setattr(PrefixCache, "open", spy)
    ask(dialogue, "Tell me about the sea.")
    first = len(render(dialogue.decoder.tokenizer, dialogue.messages[:1]))
    dialogue.use("pld")
    ask(dialogue, "And then?")
    assert num_known[0] == 0
    assert num_known[1] > first, "the first turn was read again"


def test_an_answer_that_is_left_stays_as_far_as_it_came(dialogue: Dialogue) -> None:
    whole = ask(dialogue, "Tell me about the sea.")
    dialogue.reset()
    pieces = dialogue.answer("Tell me about the sea.")
    first = next(pieces)
    pieces.close()
    assert first.token_ids == whole[: len(first.token_ids)]
    assert dialogue.messages[1] == {"role": "assistant", "content": first.text.strip()}
    plain = expected(dialogue, "Go on.")
    assert ask(dialogue, "Go on.") == plain


def test_a_message_without_an_answer_is_not_kept(dialogue: Dialogue) -> None:
    ask(dialogue, "Hello.")
    before = list(dialogue.messages)
    with pytest.raises(ValueError, match="context"):
        ask(dialogue, "sea " * 5000)
    assert dialogue.messages == before
    plain = expected(dialogue, "Hello again.")
    assert ask(dialogue, "Hello again.") == plain


def test_reset_forgets_the_messages_and_nothing_else(dialogue: Dialogue) -> None:
    ask(dialogue, "Hello.")
    learned = dialogue.decoder.drafter.memory()["adjacency"].clone()
    dialogue.reset()
    assert dialogue.messages == []
    assert torch.equal(dialogue.decoder.drafter.memory()["adjacency"], learned)


def test_a_method_comes_back_with_what_it_learned(dialogue: Dialogue) -> None:
    ask(dialogue, "Hello.")
    recycling = dialogue.decoder.drafter
    dialogue.use("pld")
    assert dialogue.decoder.drafter is not recycling
    dialogue.use("recycling")
    assert dialogue.decoder.drafter is recycling
    with pytest.raises(ValueError, match="did you mean recycling"):
        dialogue.use("recycle")
    assert dialogue.decoder.method == "recycling", "a mistake changes nothing"


def test_a_method_without_defaults_is_named_with_the_option(dialogue: Dialogue) -> None:
    with pytest.raises(ValueError, match=r"method sps: has no default .*: draft_model: got none"):
        dialogue.use("sps")


def test_turns_draw_with_seeds_of_their_own(model: PreTrainedModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)

    def two_turns(method: str, seed: int) -> list[list[int]]:
        decoder = SpeculativeDecoder(model, tokenizer, method)
        drawing = Dialogue(decoder, seed, max_new_tokens=LIMIT, temperature=1.0)
        first = ask(drawing, "Hello.")
        drawing.messages = []
        again = ask(drawing, "Hello.")
        assert again == first, "a conversation that begins anew draws the same"
        return [first, ask(drawing, "Hello.")]

    drawn = two_turns("recycling", 1)
    assert drawn[0] != drawn[1]
    assert two_turns("vanilla", 1) == drawn
    assert two_turns("vanilla", 2)[0] != drawn[0]


def test_a_tokenizer_without_a_template_gets_lines() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    messages = [{"role": "assistant", "content": "one"}, {"role": "user", "content": "two"}]
    with_template = render(tokenizer, messages)
    tokenizer.chat_template = None
    assert render(tokenizer, messages) == tokenizer("one\ntwo\n").input_ids != with_template


def test_a_method_that_cannot_run_here_is_named_with_the_reason(
    dialogue: Dialogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    library_of_pool.cache_clear()
    with pytest.raises(
        ValueError, match=r"^method hybrid: the candidate pool .*: no C\+\+ compiler"
    ):
        dialogue.use("hybrid")
    assert dialogue.decoder.method == "recycling", "a mistake changes nothing"
