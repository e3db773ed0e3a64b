"""Hidden states of a step reach a drafter: those of a plain pass along each node's path.

Run: pytest tests/model/backends/passes/test_hidden.py
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaModel

from evaluation.replay.replaying import check_replayable
from model.api.decoder import SpeculativeDecoder
from model.backends import target as target_module
from model.backends.passes.hidden import FINAL, layers_of
from model.backends.passes.prefix_cache import PrefixCache
from model.backends.proofs.support import UnsupportedModelError
from model.backends.target import TargetModel
from model.budget.cost_model import CostModel
from model.budget.paced import CostAwareDrafter, PacedDrafter
from model.engine.budget import DraftBudget
from model.engine.drafter import Drafter, Needs, VerifiedStep
from model.engine.loop import generate
from model.engine.rules import SamplingRule, sampling_processors
from model.engine.tree import DraftTree
from tests.model.decoded import random_ids, referee, target_of

LLAMA = "Llama, grouped heads"
# Attention alone, positions of its own, two kinds of attention; states beside attention, in turn and in each.
FAMILIES = (LLAMA, "GPT-2", "OPT", "Gemma 2", "Qwen3.5", "Falcon-H1")
PROMPT = random_ids(30, seed=5)
TOLERANCE = 1e-4  # between states of about 1 (5e-6 measured)


class Watcher(CostAwareDrafter):
    """Drafts random trees around the right continuation, and notes every hidden state with its text."""

    def __init__(self, target: TargetModel, layers: tuple[int, ...], answer: Sequence[int]) -> None:
        super().__init__(None, target.vocab_size, target.device)
        self.needs = Needs(hidden_layers=layers)
        self.max_nodes = 8
        self.answer = list(answer)
        self.source = random.Random(0)
        self.seen: list[tuple[tuple[int, ...], torch.Tensor]] = []

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Begin a text."""
        self.text: list[int] = []
        self.prompt_length = len(prompt_ids)

    def observe_prompt_hidden(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        """Note a chunk of the prompt."""
        assert len(token_ids) == len(hidden)
        for token, row in zip(token_ids, hidden, strict=True):
            self.text.append(token)
            self.seen.append((tuple(self.text), row))

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Return two right tokens and wrong ones beside them."""
        right = self.answer[len(context) - self.prompt_length :][: min(2, budget.max_depth)]
        if len(right) < 2:
            return DraftTree.chain(context[-1:])
        if budget.chain_only:
            return DraftTree.chain([context[-1], *right])
        wrong = [self.source.randrange(self.vocab_size) for _ in range(3)]
        tokens = [context[-1], wrong[0], right[0], wrong[1], right[1], wrong[2]]
        return DraftTree.from_lists(tokens, (-1, 0, 0, 1, 2, 2))

    def observe(self, step: VerifiedStep) -> None:
        """Note every node."""
        topology, tokens = step.tree.topology, step.acceptance.node_tokens
        assert step.hidden is not None
        assert len(step.hidden) == topology.num_nodes
        for node, row in enumerate(step.hidden):
            path = [tokens[ancestor] for ancestor in topology.path_to(node)]
            self.seen.append(((*self.text, *path), row))
        self.text += [tokens[node] for node in step.acceptance.path]


def plain_states(target: TargetModel, text: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
    """Return transformers' own hidden states of a text's last token, in a pass without a cache."""
    output = target.model(
        torch.tensor([text], device=target.device), use_cache=False, output_hidden_states=True
    )
    return torch.cat([output.hidden_states[layer][0, -1] for layer in layers])


def check(target: TargetModel, watcher: Watcher, layers: Sequence[int]) -> None:
    """Compare some of the noted states, the last ones among them, with plain ones."""
    assert len(watcher.seen) > len(PROMPT)
    some = [*watcher.seen[:: max(1, len(watcher.seen) // 24)], *watcher.seen[-6:]]
    for text, row in some:
        expected = plain_states(target, text, layers)
        assert (row - expected).abs().max() < TOLERANCE, f"a text of {len(text)} tokens"


@pytest.mark.parametrize(
    ("family", "layers"),
    # transformers lists the outputs of Mamba's layers, not what they read.
    [("Mamba", (FINAL,)), *((family, (1, 0, FINAL)) for family in FAMILIES)],
)
@torch.inference_mode()
def test_hidden_states_are_those_of_a_plain_pass(family: str, layers: tuple[int, ...]) -> None:
    target = target_of(family)
    expected = referee(target, PROMPT, 20)
    watcher = Watcher(target, layers, expected)
    answer = generate(target, watcher, PROMPT, max_new_tokens=20)
    assert answer.token_ids == expected
    assert max(answer.accept_lengths) > 1, "no draft was accepted"
    check(target, watcher, layers)
    covered = [text for text, _ in watcher.seen[: len(PROMPT) - 1]]
    assert covered == [tuple(PROMPT[:end]) for end in range(1, len(PROMPT))]


@torch.inference_mode()
def test_a_prompt_read_in_chunks_shows_all_its_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "PREFILL_CHUNK", 7)
    target = target_of(LLAMA)
    watcher = Watcher(target, (0, FINAL), referee(target, PROMPT, 12))
    generate(target, watcher, PROMPT, max_new_tokens=12)
    check(target, watcher, (0, FINAL))


@torch.inference_mode()
def test_a_known_beginning_is_read_again_for_its_states() -> None:
    target, prefix_cache = target_of(LLAMA), PrefixCache()
    watcher = Watcher(target, (FINAL,), referee(target, PROMPT, 12))
    for _ in range(2):
        watcher.seen = []
        generate(target, watcher, PROMPT, max_new_tokens=12, prefix_cache=prefix_cache)
        assert watcher.seen[0][0] == (PROMPT[0],)
        check(target, watcher, (FINAL,))


@torch.inference_mode()
def test_near_ties_leave_the_states_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TargetModel, "tie_margin", 0.3)
    target = target_of(LLAMA)
    expected = referee(target, PROMPT, 20)
    watcher = Watcher(target, (FINAL,), expected)
    read, again = target.reference, []
    monkeypatch.setattr(target, "reference", lambda: again.append(1) or read())
    assert generate(target, watcher, PROMPT, max_new_tokens=20).token_ids == expected
    assert again, "no token was a near-tie"
    check(target, watcher, (FINAL,))


@torch.inference_mode()
def test_sampled_texts_show_their_states() -> None:
    target = target_of(LLAMA)
    watcher = Watcher(target, (1, FINAL), random_ids(20))
    rule = SamplingRule(sampling_processors(1.0, 0, 1.0), torch.Generator().manual_seed(0))
    generate(target, watcher, PROMPT, max_new_tokens=20, rule=rule)
    check(target, watcher, (1, FINAL))


def test_a_pass_beside_a_draft_leaves_no_hook() -> None:
    target = target_of(LLAMA)
    watcher = Watcher(target, (0, FINAL), referee(target, PROMPT, 4))
    generate(target, watcher, PROMPT, max_new_tokens=4)
    hooks = [
        hook
        for module in target.model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not str(hook.__module__).startswith("transformers.")
    ]
    assert not hooks


def test_resting_hides_no_row_from_a_drafter() -> None:
    target = target_of(LLAMA)
    watcher = Watcher(target, (FINAL,), referee(target, PROMPT, 20))
    # A draft costs a thousand plain steps.
    watcher.costs = CostModel((1, 2, 8), (1.0, 1e3, 1e3), (1.0, 1e3, 1e3))
    watcher.wants_costs = True
    paced = PacedDrafter(watcher, target)
    answer = generate(target, paced, PROMPT, max_new_tokens=20)
    sizes = {step.num_nodes for step in answer.steps}
    assert 1 in sizes
    texts = [len(text) for text, _ in watcher.seen]
    assert set(range(1, len(PROMPT) + 19)) <= set(texts), "a row of the text is missing"


def refused(target: TargetModel, layers: tuple[int, ...], says: str) -> None:
    watcher = Watcher(target, layers, [])
    with pytest.raises(UnsupportedModelError, match=says) as error:
        watcher.check_target(target)
    assert "\n" not in str(error.value)


def test_what_shows_no_hidden_states_is_refused_in_one_line() -> None:
    target = target_of(LLAMA)
    refused(target, (2,), r"got layer 2; allowed: -1 to 1")
    refused(target, (-2,), r"got layer -2; allowed: -1 to 1")
    refused(target_of("Gemma 4 text"), (FINAL,), "over 2 tokens shows 1 rows of layer -1")
    refused(target_of("Gemma 3n text"), (0,), "over 2 tokens shows none of layer 0")
    with pytest.raises(UnsupportedModelError, match="no list of 3 layers in LlamaForCausalLM"):
        layers_of(target.model, 3)


def test_layers_that_are_run_from_elsewhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TargetModel(target_of(LLAMA).model)
    # As `module.forward(...)`, which no hook sees.
    monkeypatch.setattr(LlamaModel, "__call__", LlamaModel.forward)
    refused(target, (FINAL,), "no module around the layers of LlamaForCausalLM returns them")


def test_a_heads_hidden_size_is_the_models() -> None:
    target = target_of(LLAMA)
    watcher = Watcher(target, (FINAL,), [])
    watcher.needs = Needs(hidden_layers=(FINAL,), hidden_size=31)
    with pytest.raises(ValueError, match=r"has a hidden size of 32; allowed: 31"):
        watcher.check_target(target)


def test_recordings_refuse_methods_that_read_hidden_states() -> None:
    watcher = Watcher(target_of(LLAMA), (FINAL,), [])
    with pytest.raises(Exception, match="needs hidden states, as no trace has"):
        check_replayable(watcher, "watcher", Mock(num_likeliest=4), has_costs=False)


def test_a_drafter_reads_none_by_default() -> None:
    assert Drafter.needs.hidden_layers == ()
    decoder = SpeculativeDecoder(target_of(LLAMA), method="pld")
    assert decoder.drafter.needs.hidden_layers == ()
