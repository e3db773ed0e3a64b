"""Every kind of change between texts of a model that several decoders share is in the next text.

Run: pytest tests/fuzz/test_changes.py; one kind: -k "an adapter merged"
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from tests.fuzz.changes import CHANGES, adapters
from tests.fuzz.scene import Inapplicable, Scene
from tests.fuzz.surroundings import surroundings
from tests.fuzz.walks import LLAMA, PROMPT

# Kinds that a second decoder of a model, or every decoder, does not see yet.
UNSEEN = {
    *(f"{kind} added" for kind in adapters.KINDS),
    "a bias added",
    "a bias removed",
    "an attention that is not causal",
    "another activation",
    "merged and unloaded for good",
    "networks exchanged",
    "one number by .data",
    "one number of an embedding row by .data",
    "one number of numpy's view",
    "the __call__ of a network's class",
    "the attention_scaling of a rotary embedding",
    "the embedding row of a prompt's token by .data",
    "the eps of a norm",
    "the forward of the class of a layer",
    "the module's apply_rotary_pos_emb patched",
    "the module's rotate_half patched",
    "the registered sdpa attention replaced",
    "the scaling of an attention",
    "torch's linear patched",
    "torch's scaled_dot_product_attention patched",
    "torch's silu patched",
    "weight_norm, its magnitude written",
}


@pytest.fixture(autouse=True, scope="module")
def _surroundings() -> Iterator[None]:
    with surroundings():
        yield


def llama() -> Scene:
    """Return a Llama with a decoder, a session of it, and its own `generate` accelerated."""
    scene = Scene(LLAMA)
    scene.add_decoder("recycling")
    scene.add_session(Random(0))
    scene.add_accelerated("pld")
    return scene


# Scenes in which no change is in effect; a test that fails leaves none.
_SCENES: list[Scene] = []


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - UNSEEN))
def test_each_kind_of_change_is_in_the_next_text(name: str) -> None:
    kind = CHANGES[name]
    scene = _SCENES.pop() if _SCENES else llama()
    scene.last = list(PROMPT)
    with scene:
        before = scene.check(PROMPT, may_refuse=False)
        try:
            scene.change(name, kind.apply, seed=3)
        except Inapplicable:
            pytest.skip("needs a package that is not installed, or sizes that this model has not")
        after = scene.check(PROMPT, kind.may_refuse)
        assert after != before or not kind.is_seen, "the change changes nothing"
        scene.undo()
        assert scene.check(PROMPT, may_refuse=False) == before
    _SCENES.append(scene)
