"""Hydra's heads, and their published checkpoints.

A checkpoint is a folder with `config.json` and `hydra_lm_head.pt`, as ankner's, or
`hydra_lm_head.safetensors` with the same names: a prefix layer (`prefix_embeding_layer`, spelled so),
blocks (`hydra_mlp.i`) and output layers (`hydra_lm_head.i`). The published files repeat the target
model's embedding, which is not read. Heads without output layers use the target model's.

Shapes: K heads, D hidden size, V vocabulary, n rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..decoder_layer import DecoderLayer, LayerShape, RMSNorm, Rows, attend, causal_mask
from ..head_files import HeadFiles, read_heads, write_heads
from ..residual_heads import ResidualBlock

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
    """The shape of a checkpoint."""

    num_heads: int  # K
    num_layers: int  # residual blocks of a head; the first reads all guesses so far
    vocab_size: int | None  # V; None if the heads use the target model's output head


class TextLayer(DecoderLayer):
    """A decoder layer with a norm before its attention; every row sees those before it."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, states: torch.Tensor, rows: Rows | None) -> torch.Tensor:
        """Return the layer's output for states [..., n, D].

        Args:
            states: after all rows, or whole texts.
            rows: the text's rows so far; they grow. None: the states are whole texts.
        """
        begin, count = rows.length if rows else 0, states.shape[-2]
        positions = torch.arange(begin, begin + count, device=states.device)
        projected = self.self_attn.project(self.input_layernorm(states), positions)
        if rows is None:
            return self.finish(states, attend(projected, None, is_causal=True))
        return self.finish(states, rows.attend(projected, causal_mask(begin, count, states.device)))


class PrefixLayer(nn.Module):
    """A decoder layer over the hidden states of the whole text, and a norm."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.layers = nn.ModuleList([TextLayer(shape)])
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, hidden: torch.Tensor, rows: Rows | None = None) -> torch.Tensor:
        """Return the prefix states [..., n, D] of hidden states; with `rows`, after those of the text."""
        states: torch.Tensor = self.norm(self.layers[0](hidden, rows))
        return states


class HydraHeads(nn.Module):
    """The prefix layer and K heads.

    Dropout keeps the published numbers of the layers; it does nothing.
    """

    def __init__(self, shape: HydraShape, layer: LayerShape) -> None:
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
    """Read a checkpoint's config and names.

    Raises:
        ValueError: if a file is missing or unreadable, or the heads are of another architecture.
    """
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
