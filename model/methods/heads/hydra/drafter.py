"""Hydra: heads as Medusa's, but each reads the guesses of those before it.

A prefix layer reads the final hidden states of the whole text. Head i reads the prefix state after
the text with the embeddings of the last token and of i guesses after it, and guesses the next one;
so each path of the tree has guesses of its own. A static tree is filled level by level, on the device.
The common verification takes the place of the paper's typical acceptance.

Source: Z. Ankner et al., Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding, arXiv
2402.05109 (Hydra++: grounded heads with a prefix layer).

Shapes: K heads, D hidden size, V vocabulary, N nodes, p nodes of a level with children, k guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ....engine.budget import DraftBudget
from ....engine.drafter import VerifiedStep
from ....engine.target import TargetModel
from ....engine.tree import DraftTree
from ....kernels.largest_logits import top_k
from ....machine.hardware import uploaded
from ....options import Options, option
from ..decoder_layer import LayerShape, Rows
from ..drafter import NUM_NODES, StaticHeadDrafter
from ..head_files import called, heads_option, required
from ..tree_levels import Level, levels_of
from .heads import HydraHeads, HydraShape, read_hydra, write_hydra


@dataclass(frozen=True, slots=True)
class HydraConfig(Options):
    heads: str | None = heads_option("hydra_lm_head")
    num_nodes: int = option(NUM_NODES, "drafted nodes of a tree", least=1, most=NUM_NODES)


class HydraDrafter(StaticHeadDrafter):
    """Drafts a static tree, each level from the one before it."""

    config_class = HydraConfig
    _heads: HydraHeads | None

    def __init__(self, config: HydraConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        files, self._shape = read_hydra(required(config.heads))
        hidden_size = files.size_of("hydra_mlp.0.1.linear.weight", 0)
        self._take(files, self._shape.num_heads, self._shape.vocab_size, hidden_size)
        self._layer: LayerShape | None = None
        self._embed: Any = None
        self._rows: Rows | None = None
        self._prefix: torch.Tensor | None = None  # after the text but its last token, [D]

    def check_config(self, config: Any) -> None:
        """Check the sizes of the target model, and all tensors by them."""
        super().check_config(config)
        self._layer = LayerShape.of_config(config)
        with torch.device("meta"):
            self._files.check(self._new_heads().state_dict())

    def _new_heads(self) -> HydraHeads:
        assert self._layer is not None
        return HydraHeads(self._shape, self._layer)

    def _bind(self, target: TargetModel) -> None:
        self._embed = target.model.get_input_embeddings()
        super()._bind(target)

    @classmethod
    def write_untrained_heads(cls, folder: Path, config: Any) -> None:
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            shape = HydraShape(4, 1, config.vocab_size)
            heads = HydraHeads(shape, LayerShape.of_config(config))
        write_hydra(folder, heads, "untrained")

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._prefix = None
        if self._heads is not None:
            dtype = next(self._heads.parameters()).dtype
            self._rows = Rows(self._heads.layer, self.device, dtype)

    def observe_prompt_hidden(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        self._read(hidden)

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Fill the tree; the root alone after a prompt of one token, which leaves no state."""
        tree = self._tree.within(budget)
        if self._prefix is None or tree.topology.max_depth == 0:
            return DraftTree.chain(context[-1:])
        root = uploaded(context[-1:], self.device)
        return DraftTree(self._fill(root, levels_of(tree, self.device)), tree.topology)

    def observe(self, step: VerifiedStep) -> None:
        """Read the accepted nodes; the bonus token comes after the last one."""
        assert step.hidden is not None
        self._read(step.hidden[uploaded(step.acceptance.path, step.hidden.device)])

    @torch.inference_mode()
    def _read(self, hidden: torch.Tensor) -> None:
        assert self._heads is not None and self._rows is not None
        self._prefix = self._heads.prefix_embeding_layer(hidden, self._rows)[-1]

    @torch.inference_mode()
    def _fill(self, root: torch.Tensor, levels: list[Level]) -> torch.Tensor:
        """Return the tokens [N] of the tree, level by level."""
        assert self._heads is not None and self._prefix is not None
        tokens, found = root, [root]
        # Of each reader's path: prefix and embeddings, [p, (1 + depth) D].
        known = self._prefix[None]
        for index, level in enumerate(levels):
            embedded = called(self._embed, tokens[level.readers])
            known = torch.cat((known, embedded), dim=-1)
            states = self._heads.states(index, known)  # [p, D]
            if self._shape.vocab_size is None:
                logits = called(self._output, states)
            else:
                logits = self._heads.logits(index, states)
            _, guesses = top_k(logits, level.num_guesses)  # [p, k]
            tokens = guesses[level.parents, level.ranks]
            found.append(tokens)
            if index + 1 < len(levels):
                known = known[level.parents[levels[index + 1].readers]]
        return torch.cat(found)
