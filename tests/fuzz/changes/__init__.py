"""Kinds of changes that people make to a loaded model between texts; each names what it does."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tests.fuzz.changes import adapters, code, modules, weights
from tests.fuzz.changes.kind import CHANGES, Change
from tests.fuzz.scene import Finding, Scene

__all__ = ["CHANGES", "Change", "Walk", "adapters", "change_one", "code", "modules", "weights"]


def change_one(scene: Scene, random: Random, log: list[str]) -> None:
    """Apply a change that the scene has room for, and note its name before, for a finding within it."""
    while True:
        name = random.choice(sorted(CHANGES))
        log.append(name)
        try:
            scene.change(name, CHANGES[name].apply, random.randrange(2**31))
        except Finding:
            raise
        except Exception:  # of torch or transformers, where two changes do not go together
            log.pop()
            continue
        return


@dataclass
class Walk:
    """Random changes of a scene: new ones, and the last one undone.

    Attributes:
        scene: what is changed.
        random: chooses.
        log: what was done so far, for a finding.
    """

    scene: Scene
    random: Random
    log: list[str]

    def step(self) -> str:
        """Apply a change, or undo the last one; return what was done."""
        scene = self.scene
        if scene.undos and (len(scene.undos) >= 4 or self.random.random() < 0.4):
            self.log.append(f"undone: {scene.undos[-1][0]}")
            scene.undo()
        else:
            change_one(scene, self.random, self.log)
        return self.log[-1]

    @property
    def may_refuse(self) -> bool:
        """Whether a refusal is right for what is in effect."""
        return any(CHANGES[name].may_refuse for name, _ in self.scene.undos)
