"""Recurrent and convolution states: after a draft they are those of plain decoding, on every way to them.

Run: pytest tests/model/backends/states/test_states.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import model.engine.read_out
from model.api.accelerate import speculative
from model.backends.graphs.graphed_target import GraphedTarget
from model.backends.passes.cache import TreeCache
from model.backends.passes.prefix_cache import PrefixCache
from model.backends.proofs.self_test import Probe, compare, prove, self_test
from model.backends.proofs.support import UnsupportedModelError
from model.backends.states import mixers
from model.backends.states.layers import SequenceStates, tensors_of
from model.backends.states.scans import RECURRENCES, TreeScan
from model.backends.target import TargetModel
from model.engine.levels import LevelTree
from model.engine.loop import decode, generate
from model.engine.rules import SamplingRule, sampling_processors
from model.engine.tree import DraftTree
from model.methods import METHODS, drafter_class
from model.methods.sps.drafter import load_draft_model
from tests.model.decoded import (
    SEEDED,
    drafter_for,
    known,
    methods_of,
    random_ids,
    referee,
    target_of,
    with_methods,
)
from tests.model.families.families_with_states import STATES
from tests.model.families.family import IS_VERSION_4

by_one_pass = pytest.mark.skipif(IS_VERSION_4, reason="4.57 is read level by level")

DEMO = Path(__file__).resolve().parents[4] / "data/demo"
KEPT = [family.name for family in STATES if family.name != "DeepSeek-V3.2"]
# A delta rule, Mamba 2 alone, Mamba beside attention, convolutions, and one that is read level by level.
SOME = ["Qwen3.5", "Mamba 2", "Jamba", "LFM2", "Zaya"]
# Not in the order of its levels.
PARENTS = (-1, 0, 1, 0, 3, 1, 2, 0)
PATHS = ([0], [0, 7], [0, 3, 4], [0, 1, 2, 6])
CHAIN_PATHS = ([0], [0, 1], [0, 1, 2, 3])
PREFIX = random_ids(9)
NODES = random_ids(len(PARENTS), seed=1)


def filled(target: TargetModel, text: list[int], num_single: int = 0) -> TreeCache:
    """Return a cache that has read a text, the last tokens one by one as plain decoding does."""
    cache = target.new_cache(60)
    for _ in target.prefill([*text[: len(text) - num_single], 0], cache, with_logits=False):
        pass
    for token in text[len(text) - num_single :]:
        target.forward(DraftTree.chain([token]), cache)
    return cache


def states(cache: TreeCache) -> list[torch.Tensor]:
    """Return the tensors of all states."""
    return tensors_of(cache.states.copy())


def is_close(cache: TreeCache, other: TreeCache) -> bool:
    """Whether two caches hold the same states up to rounding."""
    pairs = list(zip(states(cache), states(other), strict=True))
    assert pairs, "no states"
    return all(torch.allclose(one, two, rtol=1e-4, atol=1e-4) for one, two in pairs)


@torch.inference_mode()
@pytest.mark.parametrize("way", ["kept", "computed again", "by level"])
@pytest.mark.parametrize("name", KEPT)
def test_kept_states_are_those_of_plain_decoding(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, are_scanned = target_of(name), way != "by level"
    monkeypatch.setattr(mixers, "MOST_KEPT", 0 if way == "computed again" else 2**28)
    if are_scanned and not target.mixers.are_scanned:
        pytest.skip("its mixers are read level by level")
    was_scanned, target.mixers.are_scanned = target.mixers.are_scanned, are_scanned
    is_chain = target.chain_only
    parents = tuple(range(-1, len(NODES) - 1)) if is_chain else PARENTS
    for path in CHAIN_PATHS if is_chain else PATHS:
        cache = filled(target, PREFIX)
        target.forward(DraftTree.from_lists(NODES, parents), cache)
        cache.keep(len(PREFIX), path)
        text = PREFIX + [NODES[node] for node in path]
        assert is_close(cache, filled(target, text, num_single=len(path))), path
        other = PREFIX + [NODES[node] for node in [*path[:-1], 5]]
        assert not is_close(cache, filled(target, other, num_single=len(path))), (
            "as close to others"
        )
        assert cache.length == len(text)
    target.mixers.are_scanned = was_scanned


def test_a_draft_that_is_not_kept_leaves_no_trace() -> None:
    target = target_of("Qwen3.5")
    with torch.inference_mode():
        cache, other = filled(target, PREFIX), filled(target, PREFIX)
        target.forward(DraftTree.from_lists(NODES, PARENTS), cache)
        cache.keep(len(PREFIX), ())
    for one, two in zip(states(cache), states(other), strict=True):
        assert torch.equal(one, two)


def test_states_go_back_to_marks_alone() -> None:
    target = target_of("Jamba")
    with torch.inference_mode():
        cache = filled(target, PREFIX)
        cache.mark()
        target.forward(DraftTree.chain([3]), cache)
        target.forward(DraftTree.chain([4]), cache)
        assert [cache.nearest(number) for number in (5, 9, 10, 11, 20)] == [0, 9, 9, 11, 11]
        with pytest.raises(ValueError, match="rows: got 10 of 11; allowed: 0, 9, since states"):
            cache.keep(10, ())
        cache.keep(9, ())
        assert is_close(cache, filled(target, PREFIX))
        cache.keep(0, ())
    assert all(tensor.abs().sum() == 0 for tensor in states(cache)), "states of nothing"


@by_one_pass
@pytest.mark.parametrize("family", STATES, ids=lambda family: family.name)
def test_mixers_of_known_kinds_read_a_tree_in_one_call(family: object) -> None:
    target = target_of(family.name)
    by_level = ("Zamba", "Zaya", "MiniMax", "DeepSeek-V3.2")
    is_scanned = bool(target.mixers and target.mixers.are_scanned)
    assert is_scanned == (family.name not in by_level)


@by_one_pass
@pytest.mark.parametrize("name", ["Qwen3.5", "Mamba 2", "Mamba"])
def test_a_wrong_recurrence_is_noticed_and_levels_are_read_instead(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method in RECURRENCES.values():
        right = getattr(TreeScan, method)

        def wrong(scan: TreeScan, *arguments: object, right: object = right, **options: object):
            found = right(scan, *arguments, **options)
            scan._states = [state * 1.01 for state in scan._states]
            return found

        monkeypatch.setattr(TreeScan, method, wrong)
    target = TargetModel(known(name).build())
    assert target.mixers.are_scanned
    self_test(target)
    assert not target.mixers.are_scanned and not target.chain_only


def test_a_second_target_knows_how_states_are_read() -> None:
    """Zamba's cannot be read in one call, as the test of the first target finds; it is not made again."""
    model = known("Zamba").build()
    for _ in range(2):
        target = TargetModel(model)
        prove(target)
        assert target.mixers and not target.mixers.are_scanned
        prompt = random_ids(9)
        found = generate(target, drafter_for("recycling", target), prompt, max_new_tokens=8)
        assert found.token_ids == referee(target, prompt, 8)


def test_a_wrong_column_of_a_convolution_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LevelTree.inputs_of
    monkeypatch.setattr(
        LevelTree, "inputs_of", lambda tree, node, number: [0, *right(tree, node, number)[1:]]
    )
    # Not the trees that were used before, which know their columns.
    monkeypatch.setattr("model.backends.target.level_tree", LevelTree)
    target = TargetModel(known("LFM2").build())
    self_test(target)
    assert not target.mixers.are_scanned


def test_the_state_of_a_wrong_node_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LevelTree.place_of
    monkeypatch.setattr(LevelTree, "place_of", lambda tree, node: right(tree, max(0, node - 1)))
    with pytest.raises(UnsupportedModelError, match="chain is not lossless"):
        self_test(TargetModel(known("Zaya").build()))


def test_states_after_a_rejected_draft_that_are_not_restored_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SequenceStates, "keep", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="chain is not lossless"):
        self_test(TargetModel(known("Qwen3.5").build()))


@pytest.mark.parametrize(
    ("name", "method"),
    [pair for pair in with_methods([family.name for family in STATES]) if pair[1] in SEEDED],
)
def test_sampled_texts_are_those_of_plain_decoding(name: str, method: str) -> None:
    assert sampled_texts(name, method) == plainly_sampled(name)


@cache
def plainly_sampled(name: str) -> list[list[int]]:
    """Return the texts of plain decoding."""
    return sampled_texts(name, "vanilla")


def sampled_texts(name: str, method: str) -> list[list[int]]:
    """Return two texts, the second with the generator where the first left it."""
    target = target_of(name)
    rule = SamplingRule(sampling_processors(0.7, 0, 0.9), torch.Generator().manual_seed(11))
    drafter = drafter_for(method, target)
    answers = [generate(target, drafter, PREFIX, max_new_tokens=16, rule=rule) for _ in range(2)]
    return [answer.token_ids for answer in answers]


def with_twins(name: str, seed: int) -> TargetModel:
    """Return a target whose output rows come in pairs that differ by rounding."""
    net = known(name).build(seed)
    with torch.no_grad():
        rows = net.get_output_embeddings().weight
        rows[1:66:2] = rows[0:66:2] * (1 + 1e-7 * torch.randn(33, rows.shape[1]))
    return TargetModel(net)


def num_differing(name: str, monkeypatch: pytest.MonkeyPatch | None = None) -> int:
    """Count the answers that differ from plain decoding's, where every choice is a near-tie.

    Every method meets one of two models.
    """
    count = 0
    for seed in range(2):
        target, prompt = with_twins(name, seed), random_ids(20, seed)
        plain = generate(target, drafter_for("vanilla", target), prompt, max_new_tokens=24)
        for method in methods_of(target.config)[seed::2]:
            drafter = drafter_for(method, target)
            answer = generate(target, drafter, prompt, max_new_tokens=24)
            count += answer.token_ids != plain.token_ids
    return count


@pytest.mark.parametrize("name", SOME)
def test_near_ties_fall_as_in_plain_decoding(name: str) -> None:
    assert num_differing(name) == 0


def test_without_the_rule_near_ties_fall_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.engine.read_out, "TIE_STEPS", 0)
    assert any(map(num_differing, SOME))


@pytest.mark.parametrize(
    ("name", "method"), with_methods([*SOME, "Nemotron-H", "MiniMax"], others=3)
)
def test_turns_of_a_chat_are_answered_as_without_a_cache(name: str, method: str) -> None:
    target = target_of(name)
    drafter, cache, text = drafter_for(method, target), PrefixCache(), list(PREFIX)
    for question in ([], random_ids(5, seed=2), random_ids(6, seed=3)):
        text += question
        answer = generate(target, drafter, text, max_new_tokens=8, prefix_cache=cache).token_ids
        assert answer == referee(target, text, 8)
        text += answer


def test_states_of_a_known_beginning_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("Qwen3.5")
    assert target.is_same_in_parts
    read, prefill = [], target.prefill

    def watched(prompt_ids: list[int], cache: TreeCache, with_logits: bool) -> Iterator[object]:
        read.append(len(prompt_ids) - 1 - cache.length)
        yield from prefill(prompt_ids, cache, with_logits)

    monkeypatch.setattr(target, "prefill", watched)
    drafter, cache = drafter_for("recycling-averaged", target), PrefixCache()
    answer = generate(target, drafter, PREFIX, max_new_tokens=8, prefix_cache=cache).token_ids
    generate(target, drafter, [*PREFIX, *answer, 3, 4], max_new_tokens=4, prefix_cache=cache)
    assert read == [8, 2], "only what is new is read"
    end = len(PREFIX) + len(answer) + 2
    other = [*PREFIX, *answer, 3, 4, 5, 6]
    generate(target, drafter, other, max_new_tokens=4, prefix_cache=cache)
    assert read[2:] == [len(other) - end], "from the end of the last prompt"


@pytest.mark.parametrize("name", ["Nemotron-H", "Mamba"])
def test_models_that_compute_several_tokens_otherwise_keep_no_beginning(name: str) -> None:
    """One limits its time steps in passes over several tokens alone, the other begins each anew."""
    assert not target_of(name).is_same_in_parts


def test_a_pass_that_is_broken_off_leaves_usable_states(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("Qwen3.5")
    drafter, cache = drafter_for("recycling-averaged", target), PrefixCache()
    steps = decode(target, drafter, PREFIX, max_new_tokens=20, prefix_cache=cache)
    text = [*PREFIX, *next(steps).tokens, *next(steps).tokens]
    head = target.model.lm_head

    def broken(*_: object) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setitem(vars(head), "forward", broken)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    monkeypatch.undo()
    for prompt in ([*text, 5, 6], [*text, *random_ids(30)], PREFIX):
        answer = generate(target, drafter, prompt, max_new_tokens=20, prefix_cache=cache)
        assert answer.token_ids == referee(target, prompt, 20)


@pytest.mark.parametrize("name", ["Mamba 2", "Qwen3.5", "MiniMax"])
def test_generate_takes_the_callable_turn_after_turn(name: str) -> None:
    net, decode = known(name).build(), speculative("recycling")
    ids = torch.tensor([PREFIX])
    for _ in range(2):
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
        answer = net.generate(ids, custom_generate=decode, **options)
        assert torch.equal(answer, net.generate(ids, **options))
        ids = torch.cat((answer, torch.tensor([[3, 4]])), dim=1)


@pytest.mark.parametrize("name", ["Qwen3.5", "DeepSeek-V3.2"])
def test_static_shapes_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="static shapes allow only keys and values"):
        GraphedTarget(known(name).build())


def test_a_draft_model_with_states_is_refused(tmp_path: Path) -> None:
    known("Mamba").build().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="keeps recurrent state; allowed: attention only"):
        load_draft_model(str(tmp_path), "float32", torch.device("cpu"))


NUM_ANSWERED = 24  # tokens


@lru_cache
def hybrid_model() -> tuple[TargetModel, list[tuple[list[int], list[int]]]]:
    """Return the trained model with states, checked; and prompts of demo questions with the referee's tokens."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "hybrid-model")
    target = TargetModel(
        AutoModelForCausalLM.from_pretrained(DEMO / "hybrid-model", dtype=torch.float32).eval()
    )
    self_test(target)
    lines = (DEMO / "question.jsonl").read_text(encoding="utf-8").splitlines()[::10]
    chats = [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines]
    options = {"add_generation_prompt": True, "return_dict": False}
    prompts = [tokenizer.apply_chat_template(chat, **options) for chat in chats]
    return target, [(prompt, referee(target, prompt, NUM_ANSWERED)) for prompt in prompts]


@pytest.mark.skipif(IS_VERSION_4, reason="Qwen3.5 is not in transformers 4.57")
@pytest.mark.parametrize("method", METHODS)
def test_the_trained_model_with_states_answers_as_in_plain_decoding(method: str) -> None:
    target, texts = hybrid_model()
    assert target.mixers.are_scanned and not target.chain_only
    drafter = drafter_for(method, target)
    num_steps = num_tokens = 0
    for prompt, expected in texts:
        answer = generate(target, drafter, prompt, max_new_tokens=NUM_ANSWERED)
        assert answer.token_ids == expected
        num_steps, num_tokens = num_steps + len(answer.steps), num_tokens + NUM_ANSWERED
    if "output_id_topk" in drafter_class(method).config_class.__dataclass_fields__:
        assert num_tokens > 1.3 * num_steps


def test_half_precision_is_measured_against_its_own_loop() -> None:
    target = TargetModel(known("Qwen3.5").build().to(torch.bfloat16))
    with torch.inference_mode():
        for is_chain in (True, False):
            comparison = compare(target, Probe.random(target.vocab_size, is_chain))
            assert comparison.is_exact, str(comparison)
