"""DFlash, DSpark: a small network guesses a block of next tokens in one pass, from the model's own states.

The guesses of a block are independent (DFlash), or each is corrected by the token before it (DSpark). They are
drafted as a chain, as by the authors; as a source of the hybrid, the likely tokens of every place become a tree.

Sources: see `network`.

Shapes: n rows of a text, B rows of a block, D hidden size, W layers that are joined, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ....backends.passes.hidden import FINAL
from ....backends.target import TargetModel
from ....budget.best_first import ANY_TOKEN, Guesses
from ....engine.budget import DraftBudget
from ....engine.drafter import Needs
from ....engine.tree import DraftTree
from ....machine.hardware import uploaded
from ....options import Options, option
from ..drafter import HeadDrafter, StateReader
from ..head_files import called, check_embedding, required
from ..layers import Attend, HeadRows, Projected
from ..replayed import ReplayedRows
from .network import BlockNetwork, BlockShape, build_block, open_block, write_block

# Likely tokens of a place that another drafter gets.
GUIDE_WIDTH = 10


class Block(NamedTuple):
    """The guesses of a block, on the host."""

    tokens: list[int]  # the likeliest of each place, given the one before it
    likely: list[list[int]]  # likely tokens of each place, the likeliest first
    log_probabilities: list[list[float]]
    confidences: list[float] | None  # of each guess; None without such a head


class BlockText:
    """The rows of a text in every layer of a network."""

    def __init__(self, network: BlockNetwork, target: TargetModel) -> None:
        self._network, self._target = network, target
        self._embedding = target.model.get_input_embeddings()
        own_head = network.lm_head if network.shape.has_head else None
        self._head = own_head or target.model.get_output_embeddings()
        layers = (network.shape, target.dtype, network.shape.num_layers)
        self.fixed = ReplayedRows(target, *layers) if target.is_replayed else None
        with torch.inference_mode(False):
            # The root of a replayed block.
            self._root = torch.zeros(1, dtype=torch.long, device=target.device)
        self.clear()

    def clear(self) -> None:
        shape, target = self._network.shape, self._target
        self._rows = [HeadRows(shape, target.device, target.dtype) for _ in range(shape.num_layers)]
        if self.fixed is not None:
            self.fixed.num_read = 0

    def sibling(self) -> BlockText:
        return BlockText(self._network, self._target)

    def read(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        """Append rows: the target's states [n, W * D]; the token after each is not read."""
        if self.fixed is not None:
            self.fixed.read([0] * len(hidden), hidden, self._read_fixed)
            return
        begin = self._rows[0].length
        positions = torch.arange(begin, begin + len(hidden), device=hidden.device)
        for rows, projected in zip(self._rows, self._network.read(hidden, positions), strict=True):
            rows.append(projected)

    def _read_fixed(self, _: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        assert self.fixed is not None
        for layer, projected in enumerate(self._network.read(hidden, positions)):
            self.fixed.keep(projected, layer)

    def block(self, root: int, width: int) -> Block | None:
        """Return what follows a root, with `width` likely tokens of each place; None after no text."""
        fixed, device = self.fixed, self._target.device
        if not (fixed.num_read if fixed else self._rows[0].length):
            return None
        token = uploaded([root], device)
        if fixed is None:
            found = self._block(token, width)
        else:
            self._root.copy_(token)
            found = fixed.replayed(("block", width), partial(self._block, self._root, width))
        # One copy to the host.
        rows = found.tolist()
        likely = [[int(one) for one in row[1 : 1 + width]] for row in rows]
        confidences = [row[0] for row in rows] if self._network.shape.has_confidence else None
        return Block(
            [row[0] for row in likely], likely, [row[1 + width :] for row in rows], confidences
        )

    def _block(self, root: torch.Tensor, width: int) -> torch.Tensor:
        """Return confidence, likely tokens and their values of each guess after a root [1], [guesses, 1 + 2 k]."""
        network, fixed, device = self._network, self.fixed, self._target.device
        size, mask = network.shape.block_size, network.shape.mask_token
        token_ids = torch.cat((root, root.new_full((size - 1,), mask)))
        begin: Any = fixed.start if fixed else self._rows[0].length
        positions = torch.arange(size, device=device) + begin
        attends: list[Attend]
        if fixed is None:
            attends = [partial(_attended, rows) for rows in self._rows]
        else:
            sees = torch.ones(size, size, dtype=torch.bool, device=device)
            attends = [
                partial(fixed.attend_drafted, drafted=[], sees=sees, layer=layer)
                for layer in range(network.shape.num_layers)
            ]
        states = network(called(self._embedding, token_ids).to(device), positions, attends)
        states = states[size - network.shape.num_guesses :]  # [guesses, D]
        logits = called(self._head, states).float()  # [guesses, Q]
        if not network.shape.markov_rank:  # all guesses at once
            top = logits.log_softmax(dim=-1).topk(width, dim=-1)
            likely, values = network.token_ids(top.indices), top.values
        else:
            rows, before = [], root
            for row in logits:
                one = (row + network.bias(before).float()).log_softmax(dim=-1).topk(width, dim=-1)
                rows.append((network.token_ids(one.indices), one.values))
                before = rows[-1][0][:, 0]
            likely, values = (torch.cat(part) for part in zip(*rows, strict=True))
        found = network.confidences(states, torch.cat((root, likely[:-1, 0])))
        confidences = values.new_zeros(len(values)) if found is None else found
        return torch.cat((confidences[:, None].double(), likely.double(), values.double()), dim=1)

    @property
    def most_likely(self) -> int:
        """The most likely tokens of a place: a tiny vocabulary has fewer than are asked for."""
        return self._network.shape.draft_vocab_size


def _attended(rows: HeadRows, projected: Projected) -> torch.Tensor:
    """Return a block's attention to a text's rows, which stay as they are, and to itself."""
    length = rows.length
    attended = rows.attend(projected, None)
    rows.length = length
    return attended


@dataclass(frozen=True, slots=True)
class DFlashConfig(Options):
    heads: str | None = option(
        None, "folder of the trained drafter: config.json and model.safetensors (required)"
    )
    confidence: float = option(
        0.0,
        "a chain ends before the first guess whose confidence is lower, by the drafter's own "
        "estimate; 0: never",
        least=0,
        most=1,
    )


class DFlashDrafter(HeadDrafter, StateReader[BlockText]):
    """Drafts the likeliest tokens of a block.

    Raises:
        ValueError: if the checkpoint is missing, cannot be read or does not fit the model.
    """

    config_class = DFlashConfig

    def __init__(self, config: DFlashConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        self._checkpoint = open_block(required(config.heads))
        shape = self._checkpoint.shape
        self._checkpoint.files.check_vocabulary(shape.vocab_size, vocab_size)
        if config.confidence and not shape.has_confidence:
            raise ValueError(
                f"confidence: got {config.confidence}; allowed: 0, since heads {config.heads} have no head that "
                "estimates it"
            )
        # Until the number of the model's layers is known.
        layers = (FINAL,) * len(shape.outputs_of)
        self.needs = Needs(hidden_layers=layers, hidden_size=shape.hidden_size)
        self.max_nodes = 1 + shape.num_guesses

    @classmethod
    def write_untrained_heads(cls, folder: Path, config: Any) -> None:
        size = config.hidden_size
        shape = BlockShape(
            hidden_size=size,
            intermediate_size=2 * size,
            num_heads=1,
            num_key_value_heads=1,
            head_dim=size,
            num_layers=1,
            vocab_size=config.vocab_size,
            draft_vocab_size=config.vocab_size,
            block_size=4,
            mask_token=0,
            outputs_of=(-1,),  # any model has this one
            guesses_at_root=True,
            has_head=False,
            markov_rank=2,
        )
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            write_block(folder, BlockNetwork(shape))

    def check_config(self, config: Any) -> None:
        """Find the layers whose states are joined, by the number of the model's layers, and check them."""
        super().check_config(config)
        outputs, count = self._checkpoint.shape.outputs_of, config.num_hidden_layers
        if max(outputs) >= count:
            raise ValueError(
                f"heads {self.config.heads}: read the outputs of layers {', '.join(map(str, outputs))}; allowed: "
                f"-1 to {count - 1}, the model's"
            )
        layers = self._checkpoint.shape.hidden_layers(count)
        self.needs = replace(self.needs, hidden_layers=layers)

    def _text_of(self, target: TargetModel) -> BlockText:
        checkpoint = self._checkpoint
        if target.model.get_output_embeddings() is None and not checkpoint.shape.has_head:
            raise ValueError("model: has no output head of its own; use a method without heads")
        own = target.model.get_input_embeddings().weight
        check_embedding(checkpoint.files.folder, checkpoint.embedding, own)
        return BlockText(build_block(checkpoint, target.device, target.dtype), target)

    @torch.inference_mode()
    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        block = self._block(context, budget, 1)
        if block is None:
            return DraftTree.chain(context[-1:])
        count = len(block.tokens)
        if block.confidences is not None and self.config.confidence:
            low = (
                place for place, one in enumerate(block.confidences) if one < self.config.confidence
            )
            count = next(low, count)
        return DraftTree.chain([context[-1], *block.tokens[: min(count, budget.max_depth)]])

    @torch.inference_mode()
    def guesses(self, context: Sequence[int], budget: DraftBudget) -> Guesses | None:
        block = self._block(context, budget, GUIDE_WIDTH)
        if block is None:
            return None
        size = min(len(block.tokens), budget.max_depth)
        # A row that depends on the token before it is of that token alone.
        has_markov = self._checkpoint.shape.markov_rank > 0
        before = block.tokens[: size - 1] if has_markov else [ANY_TOKEN] * (size - 1)
        return Guesses(
            [context[-1], *before],
            range(-1, size - 1),
            block.likely[:size],
            block.log_probabilities[:size],
        )

    def _block(self, context: Sequence[int], budget: DraftBudget, width: int) -> Block | None:
        text = self.read_text()
        if text is None or not budget.max_depth:
            return None
        return text.block(context[-1], min(width, text.most_likely))

    def describe(self) -> str:
        shape = self._checkpoint.shape
        parameters = sum(tensor.numel() for tensor in self._checkpoint.files.tensors.values())
        return f"block drafter of {parameters / 1e6:.1f}M parameters, {shape.num_guesses} guesses"
