"""Random walks: changes of a model between texts, beside several readers of it."""

from __future__ import annotations

from random import Random

from tests.fuzz.changes import Walk
from tests.fuzz.scene import PLAIN_METHODS, Finding, Scene
from tests.model.decoded import random_ids

LLAMA = "Llama, grouped heads"
PROMPT = random_ids(14, seed=1)
NUM_CHANGES_OF_A_WALK = 15
FAMILIES = (
    *(LLAMA, "Qwen3", "Gemma 3 text", "Phi", "GPT-NeoX", "Mistral, sliding window", "OLMo 2"),
    *("StarCoder 2", "Gemma 2", "OPT", "GLM-4", "Qwen2"),
)


def walked(seed: int, num_changes: int) -> Scene:
    """Change a model at random, and hold every reader's text beside the plain one after each change.

    Raises:
        Finding: with what was done so far.
    """
    random = Random(seed)
    scene = Scene(random.choice(FAMILIES))
    log = [scene.family]
    with scene:
        for _ in range(1 + seed % 3):
            scene.add_decoder(random.choice(PLAIN_METHODS))
        if random.random() < 0.7:
            scene.add_session(random)
        if random.random() < 0.7:
            scene.add_accelerated(random.choice(PLAIN_METHODS))
        walk = Walk(scene, random, log)
        prompt = list(PROMPT)
        try:
            scene.check(prompt, may_refuse=False)
            for _ in range(num_changes):
                walk.step()
                prompt = next_prompt(scene, random, prompt)
                scene.check(prompt, walk.may_refuse)
        except Finding as finding:
            names = ", ".join(one.name for one in scene.readers)
            raise Finding(
                f"seed {seed}: {' | '.join(log)}; readers: {names}: {finding}"
            ) from finding
    return scene


def next_prompt(scene: Scene, random: Random, prompt: list[int]) -> list[int]:
    """Return the same prompt, one that goes on after the last text, one with the same beginning, or another."""
    drawn = random.random()
    size = scene.model.get_input_embeddings().weight.shape[0]
    if drawn < 0.4:
        found = prompt
    elif drawn < 0.7 and len(scene.last) < 60:
        found = [*scene.last, *random_ids(3, seed=random.randrange(1000))]
    elif drawn < 0.85:
        found = [*prompt[: len(prompt) // 2], *random_ids(5, seed=random.randrange(1000))]
    else:
        found = random_ids(random.randrange(5, 24), seed=random.randrange(1000))
    return [token % size for token in found]
