"""Medusa: heads beside the target model's output head each guess one of the next tokens.

Head k reads the last final hidden state of the text and guesses the token k + 1 places on. The best
guesses of each head fill a static tree, whatever their parents: rank r at depth k is head k's guess
r. The common verification takes the place of the paper's typical acceptance, so that nothing is
accepted that the model would not say.

Source: T. Cai et al., Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads, arXiv 2401.10774 (K heads; the tree of section 2.3.3 -> `heads/templates`).

A checkpoint is a folder with `config.json` and `medusa_lm_head.pt`, as FasterDecoding's, or
`medusa_lm_head.safetensors` with the same names: `i.j.linear.weight` and `.bias` for block j of head i,
and `i.J.weight` for its output layer, J blocks a head. Heads without output layers use the target
model's.

Shapes: K heads, D hidden size, V vocabulary, N nodes, k guesses of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ....budget.best_first import ANY_TOKEN, Guesser, Guesses
from ....budget.tree_template import TreeTemplate
from ....engine.budget import DraftBudget
from ....engine.drafter import VerifiedStep
from ....engine.tree import DraftTree
from ....kernels.operations import top_k
from ....machine.hardware import uploaded
from ....options import Options, option
from ..drafter import NUM_NODES, StaticHeadDrafter
from ..head_files import HeadFiles, called, heads_option, read_heads, required, write_heads
from ..layers import ResidualBlock

FILE = "medusa_lm_head"


class MedusaShape(NamedTuple):
    num_heads: int  # K
    num_layers: int  # residual blocks of a head, J
    hidden_size: int  # D
    vocab_size: int | None  # V; None if the heads use the target model's output head


class MedusaHeads(nn.ModuleList):
    """K heads, each of J residual blocks and an output layer."""

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__()
        self.shape = shape
        for _ in range(shape.num_heads):
            layers: list[nn.Module] = [
                ResidualBlock(shape.hidden_size) for _ in range(shape.num_layers)
            ]
            if shape.vocab_size is not None:
                layers.append(nn.Linear(shape.hidden_size, shape.vocab_size, bias=False))
            self.append(nn.Sequential(*layers))


def write_medusa(folder: Path, heads: MedusaHeads, model_name: str) -> None:
    """Write a checkpoint, in the dtype of the heads."""
    shape = heads.shape
    config = {
        "medusa_num_heads": shape.num_heads,
        "medusa_num_layers": shape.num_layers,
        "base_model_name_or_path": model_name,
    }
    write_heads(folder, FILE, config, heads.state_dict())


def read_medusa(folder: str) -> tuple[HeadFiles, MedusaShape]:
    """Read a checkpoint and check every tensor; raises ValueError if one is missing, extra or wrongly shaped."""
    files = read_heads(Path(folder), FILE, "medusa")
    num_layers = files.number("medusa_num_layers")
    size = files.size_of("0.0.linear.weight", 1)
    # The config of FasterDecoding/medusa-vicuna-7b-v1.3 says 2 heads, and its file has 5.
    num_heads = 1 + max(int(name.partition(".")[0]) for name in files.tensors if name[0].isdigit())
    output = f"0.{num_layers}.weight"
    vocab_size = files.size_of(output, 0) if output in files.tensors else None
    shape = MedusaShape(num_heads, num_layers, size, vocab_size)
    with torch.device("meta"):
        files.check(MedusaHeads(shape).state_dict())
    return files, shape


@dataclass(frozen=True, slots=True)
class MedusaConfig(Options):
    heads: str | None = heads_option("medusa_lm_head")
    num_nodes: int = option(NUM_NODES, "drafted nodes of a tree", least=1, most=NUM_NODES)


class MedusaDrafter(StaticHeadDrafter, Guesser):
    config_class = MedusaConfig
    _heads: MedusaHeads | None

    def __init__(self, config: MedusaConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        files, shape = read_medusa(required(config.heads))
        self._take(files, shape.num_heads, shape.vocab_size, shape.hidden_size)
        self._shape = shape
        self._num_ranks = 1 + max(self._tree.ranks)
        # Where a node's guess is in the root and, after it, all heads' guesses, by (part of the) tree.
        self._places: dict[TreeTemplate, torch.Tensor] = {}
        self._state: torch.Tensor | None = None

    def _new_heads(self) -> MedusaHeads:
        return MedusaHeads(self._shape)

    @classmethod
    def write_untrained_heads(cls, folder: Path, config: Any) -> None:
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            heads = MedusaHeads(MedusaShape(4, 1, config.hidden_size, config.vocab_size))
        write_medusa(folder, heads, "untrained")

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._state = None

    def observe_prompt_hidden(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        self._state = hidden[-1]

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Fill the tree; the root alone after a prompt of one token, which leaves no state."""
        tree = self._tree.within(budget)
        depth = tree.topology.max_depth
        if self._state is None or depth == 0:
            return DraftTree.chain(context[-1:])
        root, places = uploaded(context[-1:], self.device), self._places_of(tree)

        def filled(state: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
            _, guesses = top_k(self._logits(state, depth), self._num_ranks)  # [depth, k]
            return torch.cat((root, guesses.flatten()))[places]

        assert self._calls is not None
        return DraftTree(self._calls.run(tree, filled, self._state, root), tree.topology)

    @torch.inference_mode()
    def guesses(self, context: Sequence[int], budget: DraftBudget) -> Guesses | None:
        depth = min(self._num_heads, budget.max_depth)
        if self._state is None or depth == 0:
            return None
        top = self._logits(self._state, depth).log_softmax(dim=-1).topk(self._num_ranks, dim=-1)
        tokens, parents = [context[-1], *[ANY_TOKEN] * (depth - 1)], range(-1, depth - 1)
        return Guesses(tokens, parents, top.indices.tolist(), top.values.tolist())

    def observe(self, step: VerifiedStep) -> None:
        """Keep the state of the last accepted node, after which the bonus token comes."""
        assert step.hidden is not None
        self._state = step.hidden[step.acceptance.path[-1]]

    @torch.inference_mode()
    def _logits(self, state: torch.Tensor, depth: int) -> torch.Tensor:
        """Return the logits of the first heads, [depth, V]."""
        assert self._heads is not None
        used = list(self._heads)[:depth]
        rows = torch.stack([head(state) for head in used])  # [depth, V], or [depth, D]
        if self._shape.vocab_size is not None:
            return rows
        return called(self._output, rows)

    def _places_of(self, tree: TreeTemplate) -> torch.Tensor:
        """Return the place of each node's guess [N] among the root and all guesses."""
        if tree not in self._places:
            of_nodes = zip(tree.topology.depths[1:], tree.ranks[1:], strict=True)
            places = [0, *(1 + (depth - 1) * self._num_ranks + rank for depth, rank in of_nodes)]
            self._places[tree] = torch.tensor(places, device=self.device)
        return self._places[tree]
