"""Drafted states equal those of a plain pass, without a cache, over text and path.

The reference is written from the papers with the tensors' published names, one path at a time.

Shapes: n rows, D hidden size, H heads, d head dimension.

Run: pytest tests/model/methods/heads/eagle/test_network.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from model.methods.heads.eagle.drafter import build_network, open_checkpoint
from model.methods.heads.eagle.network import Eagle3Network, EagleNetwork
from model.methods.heads.eagle.trees import DraftText
from tests.model.methods.heads.eagle.tiny_heads import (
    HIDDEN,
    config_of,
    eagle3_tensors,
    eagle_tensors,
    write,
)

VOCAB, HEADS, HEAD_DIM = 40, 4, 8
TOLERANCE = 1e-6  # of logits of about 1 (1.3e-7 measured: norms and angles are of float32)
Tensors = dict[str, torch.Tensor]


def normed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Root mean square norm; the network takes its mean in float32."""
    wide = rows.float()
    return weight * (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).double()


def turned(rows: torch.Tensor) -> torch.Tensor:
    """Rotary positions of rows [n, H, d], by complex numbers."""
    count, half = len(rows), HEAD_DIM // 2
    angles = torch.arange(count)[:, None] / 10000.0 ** (torch.arange(half) / half)
    pairs = torch.complex(rows[..., :half], rows[..., half:])
    spun = pairs * torch.polar(torch.ones_like(angles), angles)[:, None].to(pairs.dtype)
    return torch.cat((spun.real, spun.imag), dim=-1)


def layer(
    tensors: Tensors, prefix: str, residual: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """A Llama layer over a whole text, head by head and row by row."""

    def weight(name: str) -> torch.Tensor:
        return tensors[f"{prefix}.{name}.weight"]

    def heads(name: str) -> torch.Tensor:
        return (rows @ weight(f"self_attn.{name}").T).unflatten(-1, (-1, HEAD_DIM))

    queries, keys, values = turned(heads("q_proj")), turned(heads("k_proj")), heads("v_proj")
    attended = torch.zeros(len(rows), HEADS, HEAD_DIM, dtype=rows.dtype)
    for row in range(len(rows)):
        for head in range(HEADS):
            shared = head // 2
            scores = keys[: row + 1, shared] @ queries[row, head] / HEAD_DIM**0.5
            attended[row, head] = scores.softmax(0) @ values[: row + 1, shared]
    states = residual + attended.flatten(1) @ weight("self_attn.o_proj").T
    inner = normed(states, weight("post_attention_layernorm"))
    gate = nn.functional.silu(inner @ weight("mlp.gate_proj").T)
    return states + (gate * (inner @ weight("mlp.up_proj").T)) @ weight("mlp.down_proj").T


class Reference:
    """Logits after a path, from the start.

    Args:
        tensors: the checkpoint's.
        embedding, head: the target's matrices.
    """

    def __init__(self, tensors: Tensors, embedding: torch.Tensor, head: torch.Tensor) -> None:
        self.tensors = {
            key: one.double() if one.is_floating_point() else one for key, one in tensors.items()
        }
        self.embedding, self.head = embedding, head
        self.is_fused = "midlayer.hidden_norm.weight" in tensors

    def logits(self, tokens: list[int], hidden: torch.Tensor, path: list[int]) -> torch.Tensor:
        """Logits after a text and a drafted path."""
        tensors = self.tensors
        features = hidden @ tensors["fc.weight"].T if self.is_fused else hidden
        states = self._states(tokens, features)
        for end in range(1, len(path) + 1):
            features = torch.cat((features, states[-1:]))
            states = self._states([*tokens, *path[:end]], features)
        if self.is_fused:
            return normed(states[-1], tensors["norm.weight"]) @ tensors["lm_head.weight"].T
        return states[-1] @ self.head.T

    def _states(self, tokens: list[int], features: torch.Tensor) -> torch.Tensor:
        embeddings, tensors = self.embedding[tokens], self.tensors
        if not self.is_fused:
            joined = torch.cat((embeddings, features), dim=-1)
            rows = joined @ tensors["fc.weight"].T + tensors["fc.bias"]
            return layer(tensors, "layers.0", rows, rows)
        names = ("input_layernorm", "hidden_norm")
        weights = (tensors[f"midlayer.{name}.weight"] for name in names)
        pair = [normed(one, by) for one, by in zip((embeddings, features), weights, strict=True)]
        return layer(tensors, "midlayer", features, torch.cat(pair, dim=-1))


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@torch.inference_mode()
def test_logits_are_those_of_a_plain_pass_along_the_path(method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    is_fused = method == "eagle3"
    tensors = eagle3_tensors(VOCAB, 16) if is_fused else eagle_tensors()
    more = {"draft_vocab_size": 16} if is_fused else {}
    name = write(tmp_path, config_of(VOCAB, **more), tensors)
    kind = Eagle3Network if is_fused else EagleNetwork
    network = build_network(open_checkpoint(name, kind), torch.device("cpu"), torch.float64)
    embedding, head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
    text = DraftText(network, embedding.double(), head.double(), torch.device("cpu"))
    reference = Reference(tensors, embedding.weight, head.weight)
    tokens: list[int] = []
    hidden = torch.zeros(0, HIDDEN * (3 if is_fused else 1), dtype=torch.float64)
    assert text.draft() is None
    # In parts, a draft after each: what was drafted must be forgotten.
    for count in (6, 5, 1, 3):
        new_tokens = torch.randint(VOCAB, (count,)).tolist()
        new_hidden = torch.randn(count, hidden.shape[1], dtype=torch.float64)
        text.read(new_tokens, new_hidden)
        tokens, hidden = tokens + new_tokens, torch.cat((hidden, new_hidden))
        draft = text.draft()
        assert draft is not None
        paths: list[list[int]] = [[]]
        # Levels of 3, 4 and 2 nodes under some of the level before.
        for parents in ([0, 0, 0], [2, 0, 2, 1], [3, 1]):
            for row, path in zip(draft.logits, paths, strict=True):
                assert (row - reference.logits(tokens, hidden, path)).abs().max() < TOLERANCE
            chosen = torch.randint(VOCAB, (len(parents),))
            paths = [[*paths[at], int(one)] for at, one in zip(parents, chosen, strict=True)]
            draft.deepen(torch.tensor(parents), chosen)
        for row, path in zip(draft.logits, paths, strict=True):
            assert (row - reference.logits(tokens, hidden, path)).abs().max() < TOLERANCE
