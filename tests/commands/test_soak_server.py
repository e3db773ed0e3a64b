"""A crowd at the server: answers are right, and nothing is left of those who leave, break off or send nonsense."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")

from model.engine.sequence import RunningSequence
from tests.commands.soak_server import DEEDS, Asker, expected_texts
from tests.hang import wait_for
from tests.model.serve.serving import serving


async def ask(asker: Asker, total: int, concurrency: int) -> None:
    await asker.ask(total, concurrency)
    await asker.close()


def test_a_crowd_gets_its_texts_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: weakref.WeakSet[RunningSequence] = weakref.WeakSet()
    made = RunningSequence.__init__

    def counted(text: RunningSequence, *words: object, **more: object) -> None:
        made(text, *words, **more)
        texts.add(text)

    monkeypatch.setattr(RunningSequence, "__init__", counted)
    expected = expected_texts(2)
    with serving("hybrid") as served:
        asker = Asker(str(served.client.base_url), expected)
        asyncio.run(ask(asker, 50, 50))
        thread = served.service.thread
        wait_for(lambda: not thread._running and not thread._waiting)
        assert asker.num_wrong == 0 and asker.done.keys() == DEEDS.keys()
        assert served.ask(prompt="a", max_tokens=1).status_code == 200
    gc.collect()
    assert not texts, "their rows would be kept"


def test_a_wrong_text_is_seen() -> None:
    with serving("vanilla") as served:
        asker = Asker(str(served.client.base_url), {"A boat": ["x", "y", "z", "{}"]})
        asyncio.run(ask(asker, 12, 12))
    told = [asker.done[deed] for deed in ("whole", "stream", "form", "predict")]
    assert asker.num_wrong == sum(told) > 0
