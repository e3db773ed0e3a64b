"""Hydra: heads as Medusa's, but each reads the guesses of those before it.

A prefix layer reads the final hidden states of the whole text. Head i reads the prefix state after
the text with the embeddings of the last token and of i guesses after it, and guesses the next one;
so each path of the tree has guesses of its own. A static tree is filled level by level, on the device.
The common verification takes the place of the paper's typical acceptance.

Source: Z. Ankner et al., Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding, arXiv
2402.05109 (Hydra++: grounded heads with a prefix layer).

A checkpoint is a folder with `config.json` and `hydra_lm_head.pt`, as ankner's, or
`hydra_lm_head.safetensors` with the same names: a prefix layer (`prefix_embeding_layer`, spelled so),
blocks (`hydra_mlp.i`) and output layers (`hydra_lm_head.i`). The published files repeat the target
model's embedding, which is not read. Heads without output layers use the target model's.

Shapes: K heads, D hidden size, V vocabulary, N nodes, p nodes of a level with children, k guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ....backends.target import TargetModel
from ....engine.budget import MAX_DRAFT, DraftBudget
from ....engine.drafter import Drafter, VerifiedStep
from ....engine.tree import DraftTree
from ....kernels.operations import top_k
from ....machine.hardware import uploaded
from ....options import Options, option
from ..drafter import NUM_NODES, GuessLevel, StaticHeadDrafter, levels_of
from ..head_files import HeadFiles, called, heads_option, read_heads, required, write_heads
from ..layers import (
    Attend,
    DecoderLayer,
    HeadRows,
    HeadShape,
    ResidualBlock,
    RMSNorm,
    attend_rows,
    causal_mask,
)
from ..replayed import ReplayedRows

FILE = "hydra_lm_head"
ARCHITECTURE = "prefix-mlp"
# Tensors of published files that belong to the target model, or are computed.
NOT_READ = (
    "input_embed_fn.weight",
    "prefix_embeding_layer.embed_tokens.weight",
    "prefix_embeding_layer.rotary_emb.inv_freq",
    "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq",
)


class HydraShape(NamedTuple):
    num_heads: int  # K
    num_layers: int  # residual blocks of a head; the first reads all guesses so far
    vocab_size: int | None  # V; None if the heads use the target model's output head


class TextLayer(DecoderLayer):
    """A decoder layer with a norm before its attention; every row sees those before it."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, states: torch.Tensor, rows: HeadRows | None) -> torch.Tensor:
        """Return the layer's output for states [..., n, D]: after a text's rows, which grow, or of whole texts."""
        begin, count = rows.length if rows else 0, states.shape[-2]
        positions = torch.arange(begin, begin + count, device=states.device)
        attend: Attend = partial(attend_rows, mask=None, is_causal=True)
        if rows is not None:
            attend = partial(rows.attend, mask=causal_mask(begin, count, states.device))
        return self.run(states, self.input_layernorm(states), positions, attend)


class PrefixLayer(nn.Module):
    """A decoder layer over the hidden states of the whole text, and a norm."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.layers = nn.ModuleList([TextLayer(shape)])
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, hidden: torch.Tensor, rows: HeadRows | None = None) -> torch.Tensor:
        """Return the prefix states [..., n, D] of hidden states; with `rows`, after those of the text."""
        states: torch.Tensor = self.norm(self.layers[0](hidden, rows))
        return states

    def read(self, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return the prefix states [n, D] of hidden states at positions [n], which attend by `attend`."""
        layer = self.layers[0]
        assert isinstance(layer, TextLayer)
        states = layer.run(hidden, layer.input_layernorm(hidden), positions, attend)
        normed: torch.Tensor = self.norm(states)
        return normed


class HydraHeads(nn.Module):
    """The prefix layer and K heads; dropout keeps the published numbers of the layers, and does nothing."""

    def __init__(self, shape: HydraShape, layer: HeadShape) -> None:
        super().__init__()
        self.shape, self.layer, size = shape, layer, layer.hidden_size
        self.prefix_embeding_layer = PrefixLayer(layer)
        self.hydra_mlp = nn.ModuleList()
        for index in range(shape.num_heads):
            blocks: list[nn.Module] = [nn.Dropout(0.0), ResidualBlock(size, index + 2)]
            for _ in range(shape.num_layers - 1):
                blocks += [nn.Dropout(0.0), ResidualBlock(size)]
            self.hydra_mlp.append(nn.Sequential(*blocks))
        if shape.vocab_size is not None:
            outputs = (nn.Linear(size, shape.vocab_size) for _ in range(shape.num_heads))
            self.hydra_lm_head = nn.ModuleList(
                nn.Sequential(nn.Dropout(0.0), output) for output in outputs
            )

    def states(self, index: int, inputs: torch.Tensor) -> torch.Tensor:
        """Return head `index`'s states [..., D] of a prefix state and 1 + index embeddings [..., (2 + index) D]."""
        found: torch.Tensor = self.hydra_mlp[index](inputs)
        return found

    def logits(self, index: int, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., V] of head `index`, which has an output layer, for its states."""
        found: torch.Tensor = self.hydra_lm_head[index](states)
        return found


def read_hydra(folder: str) -> tuple[HeadFiles, HydraShape]:
    """Read a checkpoint's config and names, or raise ValueError, as for heads of another architecture."""
    files = read_heads(Path(folder), FILE, "hydra")
    kind, is_grounded = files.config.get("hydra_head_arch"), files.config.get("grounded_heads")
    if kind != ARCHITECTURE or is_grounded is not True or files.config.get("hidden_state_offset"):
        raise ValueError(
            f"heads {folder}: config.json has hydra_head_arch {kind!r}, grounded_heads {is_grounded!r} and "
            f"hidden_state_offset {files.config.get('hidden_state_offset', 0)!r}; allowed: "
            f"{ARCHITECTURE!r}, true and 0"
        )
    for name in NOT_READ:
        files.tensors.pop(name, None)
    output = "hydra_lm_head.0.1.weight"
    shape = HydraShape(
        num_heads=files.number("hydra_num_heads"),
        num_layers=files.number("hydra_num_layers"),
        vocab_size=files.size_of(output, 0) if output in files.tensors else None,
    )
    return files, shape


def write_hydra(folder: Path, heads: HydraHeads, model_name: str) -> None:
    """Write a checkpoint, in the dtype of the heads."""
    config: dict[str, Any] = {
        "hydra_num_heads": heads.shape.num_heads,
        "hydra_num_layers": heads.shape.num_layers,
        "hydra_head_arch": ARCHITECTURE,
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": model_name,
    }
    write_heads(folder, FILE, config, heads.state_dict())


@dataclass(frozen=True, slots=True)
class HydraConfig(Options):
    heads: str | None = heads_option("hydra_lm_head")
    num_nodes: int = option(NUM_NODES, "drafted nodes of a tree", least=1, most=NUM_NODES)


class HydraDrafter(StaticHeadDrafter):
    config_class = HydraConfig
    _heads: HydraHeads | None

    def __init__(self, config: HydraConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        files, self._shape = read_hydra(required(config.heads))
        hidden_size = files.size_of("hydra_mlp.0.1.linear.weight", 0)
        self._take(files, self._shape.num_heads, self._shape.vocab_size, hidden_size)
        self._layer: HeadShape | None = None
        self._embed: Any = None
        self._rows: HeadRows | None = None
        self._prefix: torch.Tensor | None = None  # after the text but its last token, [D]
        # Of replayed passes: the text's rows, and the place of the prefix [1, D].
        self._fixed: tuple[ReplayedRows, torch.Tensor] | None = None

    def check_config(self, config: Any) -> None:
        """Check the sizes of the target model, and all tensors by them."""
        super().check_config(config)
        self._layer = HeadShape.of_config(config)
        with torch.device("meta"):
            self._files.check(self._new_heads().state_dict())

    def _new_heads(self) -> HydraHeads:
        assert self._layer is not None
        return HydraHeads(self._shape, self._layer)

    def for_target(self, target: TargetModel) -> Drafter:
        self._embed = target.model.get_input_embeddings()
        is_new = self._target is not target
        super().for_target(target)
        if is_new:
            self._fix_rows()
        return self

    def sibling(self) -> HydraDrafter:
        sibling = super().sibling()
        sibling._fix_rows()
        return sibling

    def _fix_rows(self) -> None:
        target, self._fixed = self._target, None
        if target is None or not target.is_replayed:
            return
        assert self._layer is not None
        with torch.inference_mode(False):
            place = torch.zeros(1, self._layer.hidden_size, dtype=target.dtype, device=self.device)
        self._fixed = ReplayedRows(target, self._layer, target.dtype), place

    @classmethod
    def write_untrained_heads(cls, folder: Path, config: Any) -> None:
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            shape = HydraShape(4, 1, config.vocab_size)
            heads = HydraHeads(shape, HeadShape.of_config(config))
        write_hydra(folder, heads, "untrained")

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._prefix = None
        if self._fixed is not None:
            self._fixed[0].num_read = 0
        elif self._heads is not None:
            dtype = next(self._heads.parameters()).dtype
            self._rows = HeadRows(self._heads.layer, self.device, dtype)

    def observe_prompt_hidden(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        self._read(hidden)

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Fill the tree; the root alone after a prompt of one token, which leaves no state."""
        tree = self._tree.within(budget)
        if self._prefix is None or tree.topology.max_depth == 0:
            return DraftTree.chain(context[-1:])
        root = uploaded(context[-1:], self.device)
        assert self._calls is not None
        fill = partial(self._fill, levels=levels_of(tree, self.device))
        return DraftTree(self._calls.run(tree, fill, root, self._prefix), tree.topology)

    def observe(self, step: VerifiedStep) -> None:
        """Read the accepted nodes; the bonus token comes after the last one."""
        assert step.hidden is not None
        self._read(step.hidden[uploaded(step.acceptance.path, step.hidden.device)])

    @torch.inference_mode()
    def _read(self, hidden: torch.Tensor) -> None:
        assert self._heads is not None
        layer = self._heads.prefix_embeding_layer
        if self._fixed is None:
            self._prefix = layer(hidden, self._rows)[-1]
            return
        rows, place = self._fixed

        def read(_: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return layer.read(hidden, positions, rows.attend)

        rows.read([0] * len(hidden), hidden, read, place)
        self._prefix = place[0]

    def _prepare(self, num_tokens: int, hidden: torch.Tensor) -> None:
        assert self._fixed is not None
        draft = partial(self.propose, [0], DraftBudget(MAX_DRAFT))
        self._fixed[0].prepare(num_tokens, lambda count: self._read(hidden[:count]), draft)

    @torch.inference_mode()
    def _fill(
        self, root: torch.Tensor, prefix: torch.Tensor, levels: list[GuessLevel]
    ) -> torch.Tensor:
        """Return the tokens [N] of the tree, level by level."""
        assert self._heads is not None
        tokens, found = root, [root]
        # Of each reader's path: prefix and embeddings, [p, (1 + depth) D].
        known = prefix[None]
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
