"""Launches of passes on a GPU: norms of one kernel each, attention by measurement, at the first use alone."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

import model.kernels.attention as attention_module
import model.kernels.measured_attention as choice_module
import model.kernels.norms as norms_module
from model.backends.graphs.graphed_target import GraphedTarget
from model.backends.proofs.self_test import self_test
from model.backends.target import TargetModel
from model.engine import read_out
from model.engine.loop import decode
from model.engine.tree import DraftTree
from model.kernels.measured_attention import FOLDED, KEYS, ROWS, choice_on_gpu
from model.kernels.norms import has_fused_rms_norm, weighted
from model.kernels.registered_attention import USUAL
from model.machine.own_forwards import OwnForwards
from tests.model.decoded import known
from tests.simulated_device.demo import FIRST_TEXT, TEXT, Setting, demo_model, prompt_of
from tests.simulated_device.device import SimulatedCuda
from tests.simulated_device.double.accounts import Accounts
from tests.simulated_device.runs import Runs

# Launches of a norm beyond one: squares, their mean, epsilon, root, two products; in half precision two casts.
SAVED = {torch.float32: 5, torch.float16: 7}
NUM_TOKENS = 12
# Layers of a 7B model, and the launches that are allowed for an eager step.
LAYERS_7B, MOST_LAUNCHES = 32, 900


@contextmanager
def always(name: str) -> Iterator[None]:
    """Let every measurement find this function the fastest."""
    with pytest.MonkeyPatch.context() as patch:
        choice = ((name,) * len(KEYS),) * len(ROWS)
        patch.setattr(attention_module, "choice_on_gpu", lambda *given: choice)
        yield


@torch.inference_mode(mode=False)
def moved(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a copy of a model on the first GPU."""
    return copy.deepcopy(model).to(dtype).to("cuda")


class Steps(NamedTuple):
    """The tokens of a text, and the most that a step costs after the first one."""

    tokens: list[int]
    launches: int
    waits: Counter[tuple[str, str]]


def decoded_on(
    gpu: SimulatedCuda | None, target: TargetModel, method: str = "recycling-averaged"
) -> Steps:
    """Decode a text, after another one; on the real GPU (None) nothing is counted."""
    accounts = gpu.accounts if gpu else Accounts()
    drafter = Setting(method).drafter(target)
    for text in (FIRST_TEXT, TEXT):
        tokens: list[int] = []
        launches, waits = 0, Counter[tuple[str, str]]()
        for step in decode(target, drafter, prompt_of(text), max_new_tokens=NUM_TOKENS):
            if tokens:  # the first step reads the prompt, too
                launches = max(launches, accounts.num_launches)
                waits |= accounts.waits
            accounts.clear()
            tokens += step.tokens
    return Steps(tokens, launches, waits)


@pytest.mark.parametrize("dtype", SAVED)
def test_norms_are_one_launch_each(gpu: SimulatedCuda, dtype: torch.dtype) -> None:
    assert not has_fused_rms_norm()
    with gpu, always(USUAL):
        model = moved(demo_model(), dtype)
        usual, fused = (
            decoded_on(gpu, TargetModel(model, use_kernels)) for use_kernels in (False, True)
        )
    if dtype == torch.float32:  # in which near-ties are decided
        assert usual.tokens == fused.tokens
    num_norms = 2 * model.config.num_hidden_layers + 1
    assert usual.launches - fused.launches == SAVED[dtype] * num_norms
    assert usual.waits == fused.waits


def test_an_eager_step_of_7b_has_few_launches(gpu: SimulatedCuda) -> None:
    launches = []
    with gpu, always(USUAL):
        model = moved(demo_model(), torch.float16)
        for num_layers in (len(model.model.layers), 1):
            model.model.layers = model.model.layers[:num_layers]
            model.config.num_hidden_layers = num_layers
            launches.append(decoded_on(gpu, TargetModel(model)).launches)
    of_a_layer = (launches[0] - launches[1]) / (demo_model().config.num_hidden_layers - 1)
    assert launches[1] + (LAYERS_7B - 1) * of_a_layer <= MOST_LAUNCHES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", FOLDED)
def test_folded_heads_are_lossless(
    function: str, dtype: torch.dtype, device_runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, calls = FOLDED[function], []
    monkeypatch.setitem(
        FOLDED, function, lambda query, *rest: calls.append(query.device) or attend(query, *rest)
    )
    with device_runs.on_device(), always(function):
        target = TargetModel(moved(known("Llama, grouped heads").build(), dtype))
        self_test(target)
    assert not target.chain_only, "a tree is not lossless"
    assert {*calls} == {torch.device("cuda:0")}


def test_attention_is_measured_at_the_first_pass_and_never_again(
    gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed: list[Any] = []
    monkeypatch.setattr(
        choice_module, "seconds_of", lambda call, wait: timed.append(call) or float(len(timed) < 9)
    )
    choice_on_gpu.cache_clear()
    with gpu:
        model = moved(known("Llama, grouped heads").build(), torch.float16)
        target = TargetModel(model)
        assert not timed
        self_test(target)
        num_timed = len(timed)
        assert num_timed == (choice_module.ROUNDS + 1) * 3 * len(ROWS) * len(KEYS)
        assert not capsys.readouterr().err, "a candidate does not work"
        gpu.accounts.clear()
        read(target)
        read(TargetModel(model))
        assert len(timed) == num_timed, "measured within an answer"
        assert not [kind for kind, _ in gpu.accounts.waits if kind == "synchronize"]
    choice_on_gpu.cache_clear()


@pytest.mark.parametrize("kind", [TargetModel, GraphedTarget])
def test_near_ties_are_decided_with_the_models_own_kernels(
    kind: type[TargetModel], device_runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norms are far off, and every token counts as a near-tie."""

    def wrong(rows: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
        return 1.5 * weighted(rows, weight, epsilon).flip(-1)

    monkeypatch.setattr(norms_module, "KINDS", (weighted,))
    tokens = {}
    with device_runs.on_device(), always(USUAL):
        model = moved(demo_model(), torch.float32)
        expected = decoded_on(
            device_runs.gpu, TargetModel(model, use_kernels=False), "vanilla"
        ).tokens
        target = kind(model)
        found = target.norms._norms._functions
        patched = {one: replace(norm, kind=wrong) for one, norm in found.items()}
        target.norms._norms = OwnForwards(patched)
        for steps in (0, 1e9):
            monkeypatch.setattr(read_out, "TIE_STEPS", steps)
            tokens[steps] = decoded_on(device_runs.gpu, target, "vanilla").tokens
    assert tokens[0] != expected
    assert tokens[1e9] == expected


def test_kernels_that_are_switched_off_are_in_no_graph(gpu: SimulatedCuda) -> None:
    with gpu, always(USUAL):
        target = GraphedTarget(moved(demo_model(), torch.float16))
        tree = DraftTree.chain([5])
        logits = []
        for use_kernels in (True, False):
            target.switch_kernels(use_kernels)
            cache = target.new_cache(40)
            with torch.inference_mode():
                for _ in range(3):  # prepared, captured, replayed
                    cache.keep(0, ())
                    logits.append(target.forward(tree, cache).cpu())
            del cache  # the next one has its rows
    assert torch.equal(logits[1], logits[2]) and torch.equal(logits[3], logits[5])
    assert not torch.equal(logits[2], logits[5])


def test_passes_that_are_replayed_are_measured_as_graphs(
    gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed: list[Any] = []
    monkeypatch.setattr(choice_module, "seconds_of", lambda call, wait: timed.append(call()) or 1.0)
    monkeypatch.setattr(choice_module, "ROWS", ROWS[:2])
    monkeypatch.setattr(choice_module, "KEYS", KEYS[:1])
    choice_on_gpu.cache_clear()
    with gpu:
        target = GraphedTarget(moved(known("Llama, grouped heads").build(), torch.float16))
        gpu.accounts.clear()
        assert target.attention.name == USUAL, "a tie"
        assert len(timed) == (choice_module.ROUNDS + 1) * 3 * 2
        # One run to see whether it works, then a warm-up before each capture; replays launch nothing.
        num_runs = 1 + choice_module.IN_A_ROW * 2
        assert gpu.accounts.launches["_softmax"] == num_runs
    assert not capsys.readouterr().err
    choice_on_gpu.cache_clear()


def read(target: TargetModel) -> None:
    """Run a prompt and a step."""
    token_ids = torch.zeros(5, dtype=torch.long, device=target.device)
    with torch.inference_mode():
        cache = target.new_cache(20)
        target.read(token_ids, 0, cache, last_logits_only=True)
        target.read(token_ids[:1], cache.length, cache, last_logits_only=True)
