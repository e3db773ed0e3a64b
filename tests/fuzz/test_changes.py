"""Every kind of change between texts of a model that several decoders share is in the next text.

Run: pytest tests/fuzz/test_changes.py; one kind: -k "an adapter merged"
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from tests.fuzz.changes import CHANGES
from tests.fuzz.scene import Inapplicable, Scene
from tests.fuzz.surroundings import surroundings
from tests.fuzz.walks import LLAMA, PROMPT


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


# Scenes in which no change is in effect, with their last text; a test that fails leaves none.
_SCENES: list[tuple[Scene, list[int]]] = []


def begun() -> tuple[Scene, list[int]]:
    """Return a scene with the text that its readers have just given."""
    scene = llama()
    return scene, scene.check(PROMPT, may_refuse=False)


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_each_kind_of_change_is_in_the_next_text(name: str) -> None:
    kind = CHANGES[name]
    scene, before = _SCENES.pop() if _SCENES else begun()
    scene.last = list(PROMPT)
    with scene:
        try:
            scene.change(name, kind.apply, seed=3)
        except Inapplicable:
            _SCENES.append((scene, before))
            pytest.skip("needs a package that is not installed, or sizes that this model has not")
        after = scene.check(PROMPT, kind.may_refuse)
        assert after != before or not kind.is_seen, "the change changes nothing"
        scene.undo()
        assert scene.check(PROMPT, may_refuse=False) == before
    _SCENES.append((scene, before))
