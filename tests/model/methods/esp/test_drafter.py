"""ESP drafts the likeliest paths of its masks' guesses; the masks change no other row, in whatever layout.

Run: pytest tests/model/methods/esp/test_drafter.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from model.backends.graphs.graphed_target import GraphedTarget
from model.backends.passes.packed import PackedPasses
from model.backends.passes.slot_passes import SlotPasses
from model.backends.proofs.support import UnsupportedModelError
from model.backends.target import TargetModel
from model.engine.batch import SharedPasses
from model.engine.budget import DraftBudget
from model.engine.drafter import VerifiedStep
from model.engine.tree import PROBE, DraftTree
from model.engine.verification import verify
from model.methods.esp.drafter import EspConfig, EspDrafter
from tests.random_llama import random_llama

VOCAB = 40
PROMPT = [3, 8, 5, 8, 9]
ROOMY = DraftBudget(50)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(random_llama(VOCAB, seed=3), use_kernels=False)


def drafter(target: TargetModel, **options: float) -> EspDrafter:
    esp = EspDrafter(EspConfig(**options), VOCAB, torch.device("cpu"))
    esp.for_target(target)
    esp.start(PROMPT)
    return esp


def nodes(tree: DraftTree) -> list[tuple[int, int]]:
    """Return the token and the parent of every node."""
    return list(zip(tree.token_ids.tolist(), tree.topology.parents, strict=True))


def logits_of(*chances: dict[int, float]) -> torch.Tensor:
    """Return logits of rows with these probabilities of tokens, [N, V]."""
    rows = torch.full((len(chances), VOCAB), 1e-6)
    for row, of_row in zip(rows, chances, strict=True):
        row[list(of_row)] = torch.tensor(list(of_row.values()))
    return rows.log()


def observed(esp: EspDrafter, tree: DraftTree, logits: torch.Tensor) -> list[int]:
    """Verify a draft; return the accepted path."""
    acceptance = verify(tree, logits, num_candidates=esp.needs.num_candidates)
    esp.observe(VerifiedStep(tree, acceptance, None))
    return acceptance.path


def test_the_likeliest_paths_are_drafted_from_the_masks_of_the_last_accepted_node(
    target: TargetModel,
) -> None:
    esp = drafter(target, num_nodes=14, num_masks=2)
    first = esp.propose(PROMPT, ROOMY)
    assert nodes(first) == [(9, -1), (PROBE, 0), (PROBE, 1)]
    # 7 follows; after it 1 (0.6) or 2 (0.3), since 7 itself would repeat its parent; then 5 or 1.
    after = logits_of({7: 0.9}, {7: 0.7, 1: 0.6, 2: 0.3}, {5: 0.8, 1: 0.1})
    assert observed(esp, first, after) == [0]
    second = esp.propose([*PROMPT, 7], ROOMY)
    # Four tokens: 1, 1 5, 2, 2 5; and two masks for each of the five nodes.
    assert nodes(second)[:5] == [(7, -1), (1, 0), (5, 1), (2, 0), (5, 3)]
    masks = [(PROBE, 0), (PROBE, 5), (PROBE, 1), (PROBE, 7), (PROBE, 2), (PROBE, 9)]
    assert nodes(second)[5:11] == masks
    assert second.topology.num_nodes == 1 + 14
    # 7 1 is right, and 4 follows; node 1's masks are nodes 7 and 8.
    after = logits_of({1: 0.9}, {4: 0.9}, *[{0: 0.9}] * 5, {6: 0.9}, {8: 0.9}, *[{0: 0.9}] * 6)
    assert observed(esp, second, after) == [0, 1]
    assert nodes(esp.propose([*PROMPT, 7, 1, 4], ROOMY))[:3] == [(4, -1), (6, 0), (8, 1)]


def test_drafts_keep_to_the_limits(target: TargetModel) -> None:
    esp = drafter(target, num_nodes=14, num_masks=2)
    tree = esp.propose(PROMPT, DraftBudget(1))
    assert nodes(tree) == [(9, -1), (PROBE, 0)]
    observed(esp, tree, logits_of({7: 0.9}, {1: 0.6, 2: 0.3}))
    chain = esp.propose([*PROMPT, 7], DraftBudget(50, chain_only=True))
    assert nodes(chain) == [(7, -1), (1, 0), (PROBE, 1), (PROBE, 2)]
    assert nodes(esp.propose([*PROMPT, 7], DraftBudget(0))) == [(7, -1)]
    esp.skip([4])
    assert nodes(esp.propose([4], ROOMY)) == [(4, -1), (PROBE, 0), (PROBE, 1)]


def test_the_mask_is_the_prompts_mean_embedding_and_follows_the_text(target: TargetModel) -> None:
    esp = drafter(target, rate=0.25)
    rows = target.model.get_input_embeddings().weight.detach()
    mean = rows[PROMPT].mean(dim=0)
    assert torch.allclose(esp.propose(PROMPT, ROOMY).probe, mean)
    esp.skip([7, 2])
    moved = 0.75 * (0.75 * mean + 0.25 * rows[7]) + 0.25 * rows[2]
    assert torch.allclose(esp.propose([2], ROOMY).probe, moved)


def expected_after(target: TargetModel, prompt: Sequence[int], tree: DraftTree) -> torch.Tensor:
    """Return the logits after every node [N, V], from a pass of its own without a cache."""
    embedding, rows = target.model.get_input_embeddings(), list[torch.Tensor]()
    for node in range(tree.topology.num_nodes):
        path = [int(tree.token_ids[each]) for each in tree.topology.path_to(node)]
        inputs = [
            tree.probe if token == PROBE else embedding.weight[token] for token in [*prompt, *path]
        ]
        rows.append(target.model(inputs_embeds=torch.stack(inputs)[None]).logits[0, -1])
    return torch.stack(rows)


@pytest.mark.parametrize("layout", [PackedPasses, lambda target: SlotPasses(target, 3)])
@torch.inference_mode()
def test_every_row_is_that_of_a_pass_of_its_own(
    target: TargetModel, layout: Callable[[TargetModel], SharedPasses]
) -> None:
    """The masks' rows too, alone and beside a text with another mask and one without any."""
    prompts = [[1, 2, 3, 4], [5, 6], [7]]
    shape = [9, 4, 5, *[PROBE] * 3], (-1, 0, 0, 0, 1, 4)
    generator = torch.Generator().manual_seed(0)
    size = target.config.hidden_size
    trees = [
        DraftTree(tree.token_ids, tree.topology, probe=torch.randn(size, generator=generator))
        for tree in [DraftTree.from_lists(*shape)] * 2
    ] + [DraftTree.chain([3, 2])]
    for count in (1, 3):
        passes = layout(target)
        caches = [passes.new_cache(20) for _ in range(count)]
        for prompt, cache in zip(prompts, caches, strict=False):
            for _ in target.prefill([*prompt, 0], cache, with_logits=False):
                pass
        found = passes.forward(trees[:count], caches).logits
        for prompt, tree, logits in zip(prompts, trees, found, strict=False):
            assert torch.allclose(logits, expected_after(target, prompt, tree), atol=1e-5)
    assert "forward" not in vars(target.model.get_input_embeddings())


def test_what_reads_no_masks_is_refused_in_one_line(target: TargetModel) -> None:
    esp = drafter(target)
    with pytest.raises(UnsupportedModelError, match=r"graphs: .* appends masks; .* graphs off"):
        esp.check_target(GraphedTarget(random_llama(VOCAB, seed=3), use_kernels=False))
    other = TargetModel(random_llama(VOCAB, seed=3), use_kernels=False)
    esp.check_target(other)
    unused = torch.nn.Embedding(VOCAB, other.config.hidden_size)
    other.model.get_input_embeddings = lambda: unused
    with pytest.raises(UnsupportedModelError, match="does not look its tokens up"):
        esp.check_target(other)


def test_options_that_are_not_allowed_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_nodes: got 4; allowed: at least 5"):
        EspConfig(num_nodes=4, num_masks=2)
    with pytest.raises(ValueError, match=r"rate: got 2.0; allowed: 0 to 1"):
        EspConfig(rate=2.0)
    # The paper's tree of one mask at a block complexity of 60.
    assert EspConfig(num_nodes=59).num_tokens == 29
