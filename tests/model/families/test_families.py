"""Every family: drafts are verified exactly, as trees or as chains, or the model is refused.

Equal tokens alone are a weak test (a random model may hardly depend on its context): the logits of
every node are compared with passes that know neither cache nor mask.

Run: pytest tests/model/families/test_families.py
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import pytest
import torch

from model.backends.proofs.packing import batch_of, why_not_packed
from model.backends.proofs.self_test import Probe, self_test, verified_logits
from model.backends.proofs.support import UnsupportedModelError, new_cache
from model.backends.target import TargetModel
from model.engine.batch import run
from model.engine.loop import generate
from model.engine.sequence import Request
from tests.model.decoded import (
    BY_NAME,
    drafter_for,
    known,
    random_ids,
    referee,
    target_of,
    with_methods,
)
from tests.model.families.families import CHAINS, FAMILIES, REFUSED, TREES
from tests.model.families.family import IS_VERSION_4

# Far above rounding (5e-6 measured), far below any bug (1e-2 and more).
TOLERANCE = 1e-4
# Longer than every window of the families (8).
PREFIX_LENGTH = 24
# One token; a repetitive text; random tokens, longer than the windows; each with its limit of new tokens. The last
# reaches the context of some models, and positions beyond those of their training.
PROMPTS = (([5], 24), ([3, 4, 5, 6] * 4, 24), (random_ids(28), 40))


VERIFIED = [family.name for family in (*TREES, *CHAINS)]


@lru_cache(maxsize=16)
def expected_tokens(
    name: str, prompt: tuple[int, ...], limit: int, eos_index: int | None
) -> list[int]:
    """Return the referee's tokens up to the model's context; the token at `eos_index` ends it."""
    target = target_of(name)
    tokens = referee(target, prompt, limit)
    if eos_index is not None:
        tokens = referee(target, prompt, limit, eos_id=tokens[eos_index])
    context = target.context_limit()
    return tokens[: context - len(prompt)] if context else tokens


def test_the_table_covers_the_families_that_are_promised() -> None:
    num_installed = sum(family.is_known for family in TREES)
    assert num_installed >= 40, f"only {num_installed} families with trees are installed"
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_families_are_there_in_the_versions_that_the_table_says() -> None:
    for family in FAMILIES:
        is_absent = IS_VERSION_4 and family.outcome_in_4 == "absent"
        assert family.is_known != is_absent, family.name


@pytest.mark.parametrize(("name", "method"), with_methods(VERIFIED))
def test_tokens_equal_generate(name: str, method: str) -> None:
    target = target_of(name)
    drafter = drafter_for(method, target)
    num_steps = num_tokens = 0
    for (prompt, limit), eos_index in zip(PROMPTS, (None, 17, None), strict=True):
        expected = expected_tokens(name, tuple(prompt), limit, eos_index)
        eos_ids = [] if eos_index is None else [expected[-1]]
        answer = generate(target, drafter, prompt, max_new_tokens=limit, eos_ids=eos_ids)
        assert answer.token_ids == expected, f"{method} differs after a prompt of {len(prompt)}"
        num_steps += len(answer.steps)
        num_tokens += len(answer.token_ids)
    if method == "recycling":
        assert num_steps < num_tokens, "no draft was accepted: the equality says nothing"
        expected = [
            expected_tokens(name, tuple(prompt), limit, None) for prompt, limit in PROMPTS[1:]
        ]
        assert batch_tokens(target, PROMPTS[1:]) == expected


def batch_tokens(target: TargetModel, prompts: Sequence[tuple[list[int], int]]) -> list[list[int]]:
    """Return the tokens of a batch of these prompts, with the chains of pld."""
    batch = batch_of(target, drafter_for("pld", target), len(prompts))
    found: list[list[int]] = [[] for _ in prompts]
    for event in run(batch, enumerate(Request(*prompt) for prompt in prompts)):
        assert event.record, event.error
        found[event.key] = [token for step in event.steps for token in step.tokens]
    return found


# What keeps several texts from sharing a pass, by family.
IN_TURN = {
    "Phi 3, longrope": "longest text",
    "Llama, dynamic rope": "longest text",
    "DeepSeek-V3.2": "index",
    "Llama 4 text": "scales queries",
    "Ministral 3": "scales queries",
}
if IS_VERSION_4:
    IN_TURN["PhiMoE"] = "the logits of a shared pass differ"
# Whose keys are no more the cache's where they attend, or whose attention is their own: one batch of the model.
IN_SLOTS = (
    *("Doge, short window", "GPT-J", "CodeGen", "DeepSeek-V2", "DeepSeek-V3", "Falcon, rotary"),
    *("JetMoe", "DiffLlama", "MiniCPM3", "XGLM"),
)
# Those that share passes in the other way with transformers 4.57.
OTHERWISE_IN_4 = ("DeepSeek-V2", "DeepSeek-V3", "StableLM", "Nemotron", "OLMoE", "XGLM")


@pytest.mark.parametrize("name", VERIFIED)
def test_texts_share_passes_unless_something_depends_on_the_whole_pass(name: str) -> None:
    target = target_of(name)
    reason = why_not_packed(target)
    if target.mixers:
        assert "states" in reason
    elif target.chain_only:
        assert "chains" in reason
    else:
        assert IN_TURN.get(name, "") in reason and bool(reason) == (name in IN_TURN)
    is_otherwise = IS_VERSION_4 and name in OTHERWISE_IN_4
    assert target.uses_slots == ((name in IN_SLOTS) != is_otherwise)


@pytest.mark.parametrize("name", VERIFIED)
def test_every_node_has_the_logits_of_a_plain_pass(name: str) -> None:
    target = target_of(name)
    probe = Probe.random(target.vocab_size, target.chain_only, PREFIX_LENGTH)
    topology = probe.topology
    paths = [topology.path_to(node) for node in range(topology.num_nodes)]
    texts = [probe.prefix + [probe.nodes[node] for node in path] for path in paths]
    with torch.inference_mode():
        expected = torch.stack(
            [last_logits(target, text) for text in [*texts, [*probe.prefix, *probe.kept]]]
        )
        found = verified_logits(target, probe)
    errors = (found - expected).abs().amax(dim=-1) / expected.std()
    worst = int(errors.argmax())
    assert float(errors.max()) <= TOLERANCE, (
        f"node {worst} of {topology.num_nodes} (the last: the step after the kept path) is off by "
        f"{float(errors.max()):.1e} standard deviations"
    )


def last_logits(target: TargetModel, token_ids: list[int]) -> torch.Tensor:
    """Return the logits after a text, from one pass without a cache.

    With states, from a pass over the prefix and one for each token after it, as in plain decoding: some
    models limit their time steps in passes over several tokens alone.
    """
    if target.mixers:
        cache = new_cache(target.model)
        logits = target.run(torch.tensor(token_ids[:PREFIX_LENGTH]), 0, cache, None)
        for position in range(PREFIX_LENGTH, len(token_ids)):
            logits = target.run(torch.tensor([token_ids[position]]), position, cache, None)
        return logits[-1].float()
    # Without a cache, the layers of Gemma 3n that share keys compute their own in 4.57.
    use_cache = IS_VERSION_4 and target.config.model_type == "gemma3n_text"
    return target.model(torch.tensor([token_ids]), use_cache=use_cache).logits[0, -1].float()


@pytest.mark.parametrize("name", VERIFIED)
def test_drafts_are_trees_unless_a_reason_is_given(name: str) -> None:
    family, target = known(name), target_of(name)
    assert ("chains" if target.chain_only else "trees") == family.expected, target.chain_reason
    assert re.search(family.reason, target.chain_reason)
    assert "\n" not in target.chain_reason


@pytest.mark.parametrize("name", [family.name for family in REFUSED])
def test_a_model_that_cannot_roll_back_is_refused_in_one_line(name: str) -> None:
    family = known(name)
    model = family.build()
    with pytest.raises(UnsupportedModelError, match=family.reason) as error:
        self_test(TargetModel(model))
    assert "\n" not in str(error.value)
    assert model.config.model_type in str(error.value)


@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.right_since])
def test_a_model_whose_passes_are_wrong_is_refused(name: str) -> None:
    family = BY_NAME[name]
    if not family.is_broken:
        pytest.skip("its passes are right in this version of transformers")
    with pytest.raises(UnsupportedModelError, match="not lossless"):
        self_test(TargetModel(family.build()))
