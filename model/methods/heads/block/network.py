"""The network of block drafters: it reads a root and masks after it, and says all their next tokens at once.

Every layer attends to the text through the target model's own states: those of several layers are joined to one
row a token, from which each layer makes its keys and values. The root and its masks see these, and each other.

Three forms of checkpoints are read, by the entries of their `config.json`: z-lab/dflash's (`dflash_config`),
DeepSpec's (`markov_rank`) and that of the package speculators (`speculators_model_type` dflash or dspark).

Sources: DFlash, arXiv 2602.06036, and its code, github.com/z-lab/dflash at 44947fb; DSpark and its code,
github.com/deepseek-ai/DeepSpec at afdfa7c (a Markov head: a bias by the token before; a confidence head);
github.com/vllm-project/speculators at c05b95b.

Shapes: B rows of a block, root first, n rows of a text, D hidden size, W layers that are joined, V vocabulary of
the target model, Q tokens that can be drafted, r rank of a Markov head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ....backends.passes.hidden import FINAL
from ....machine.files import written_state
from ..head_files import HeadFiles, read_heads, write_heads
from ..layers import Attend, Attention, FeedForward, HeadShape, Projected, RMSNorm

FILE = "model"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# Tensors that a checkpoint may hold beside its network: what training compared with.
NOT_READ = (EMBEDDING, "verifier_lm_head.weight", "verifier_norm.weight")
SPECULATORS = ("dflash", "dspark")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape(HeadShape):
    """Shape of a block drafter: of its layers, which have the target model's hidden size, and of what is around."""

    num_layers: int
    vocab_size: int  # V
    draft_vocab_size: int  # Q
    block_size: int  # B
    mask_token: int
    # The states that are joined: outputs of the target's layers, -1 of its embedding.
    outputs_of: tuple[int, ...]
    # Whether row i guesses the token after its place (DSpark), or the one at it.
    guesses_at_root: bool
    has_head: bool  # whether it has an output head of its own
    markov_rank: int = 0  # r; 0: no Markov head
    has_confidence: bool = False
    confidence_reads_markov: bool = False

    @property
    def num_guesses(self) -> int:
        return self.block_size if self.guesses_at_root else self.block_size - 1

    def hidden_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the states that are joined as `Needs.hidden_layers`, for a target of so many layers."""
        inputs = (output + 1 for output in self.outputs_of)
        return tuple(FINAL if one == num_layers else one for one in inputs)


class BlockLayer(nn.Module):
    """Qwen3's layer, whose attention also reads rows of the text that are not its own."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape, shape.hidden_size, has_bias=False, has_norms=True)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(
        self, states: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Return the states [..., B, D] of a block at its positions [B]."""
        attended = attend(self.self_attn.project(self.input_layernorm(states), positions))
        states = states + self.self_attn.o_proj(attended.transpose(-3, -2).flatten(-2))
        output: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output


class MarkovHead(nn.Module):
    """A bias [Q] of the next token by the one before it."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(shape.vocab_size, shape.markov_rank)
        self.markov_w2 = nn.Linear(shape.markov_rank, shape.draft_vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


class BlockNetwork(nn.Module):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        size, eps = shape.hidden_size, shape.norm_eps
        self.fc = nn.Linear(len(shape.outputs_of) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList([BlockLayer(shape) for _ in range(shape.num_layers)])
        self.norm = RMSNorm(size, eps)
        if shape.has_head:
            self.lm_head = nn.Linear(size, shape.draft_vocab_size, bias=False)
        if shape.markov_rank:
            self.markov_head = MarkovHead(shape)
        if shape.has_confidence:
            more = shape.markov_rank if shape.confidence_reads_markov else 0
            self.confidence_head = ConfidenceHead(size + more)
        if shape.draft_vocab_size < shape.vocab_size:
            offsets = torch.zeros(shape.draft_vocab_size, dtype=torch.long)
            self.register_buffer("d2t", offsets)  # token id less place, of every place
            self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool))

    def read(self, hidden: torch.Tensor, positions: torch.Tensor) -> list[Projected]:
        """Return each layer's rows of the text: of the target's states [..., n, W * D] at their positions [n]."""
        joined = self.hidden_norm(self.fc(hidden))
        layers = cast("Sequence[BlockLayer]", self.layers)
        return [layer.self_attn.project(joined, positions) for layer in layers]

    def forward(
        self, embeddings: torch.Tensor, positions: torch.Tensor, attends: Sequence[Attend]
    ) -> torch.Tensor:
        """Return the states [..., B, D] of the embeddings of a block at its positions [B]; `attends`: to the
        text's rows and the block's, by layer.
        """
        states = embeddings
        for layer, attend in zip(self.layers, attends, strict=True):
            states = layer(states, positions, attend)
        normed: torch.Tensor = self.norm(states)
        return normed

    def bias(self, token: torch.Tensor) -> torch.Tensor:
        """Return the Markov head's bias [1, Q] of the token after this one, [1]."""
        found: torch.Tensor = self.markov_head.markov_w2(self._before(token))
        return found

    def _before(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the Markov head's rows [tokens, r]; zeros for tokens without a logit, which prompts may hold."""
        table = self.markov_head.markov_w1.weight
        rows: torch.Tensor = table[tokens.clamp(max=len(table) - 1)]
        return rows * (tokens < len(table))[:, None]

    def confidences(self, states: torch.Tensor, before: torch.Tensor) -> torch.Tensor | None:
        """Return how likely each guess is accepted [guesses], by its state and the token before it; None without
        such a head.
        """
        if not self.shape.has_confidence:
            return None
        if self.shape.confidence_reads_markov:
            states = torch.cat((states, self._before(before)), dim=-1)
        found: torch.Tensor = self.confidence_head.proj(states)[:, 0].float().sigmoid()
        return found

    def token_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Return the token ids of places among the logits."""
        if self.shape.draft_vocab_size == self.shape.vocab_size:
            return draft_ids
        assert isinstance(self.d2t, torch.Tensor)
        return draft_ids + self.d2t[draft_ids]


@dataclass(frozen=True, slots=True, eq=False)
class BlockCheckpoint:
    shape: BlockShape
    files: HeadFiles  # its tensors: those of the network alone
    embedding: torch.Tensor | None  # the target's embedding [V, D] as stored; None if it is not


def open_block(name: str) -> BlockCheckpoint:
    """Open a checkpoint, or raise ValueError if it cannot be read, or holds what is not supported.

    The last ones stay open while the files in their folders are unchanged.
    """
    opened: BlockCheckpoint = _opened(name, written_state(name))
    return opened


@lru_cache(maxsize=2)
def build_block(
    checkpoint: BlockCheckpoint, device: torch.device, dtype: torch.dtype
) -> BlockNetwork:
    """Return the network of a checkpoint on a device, for inference."""
    with torch.device("meta"):
        network = BlockNetwork(checkpoint.shape)
    checkpoint.files.load_into(network, dtype, device)
    return network.to(device)  # tables of tokens too


def write_block(folder: Path, network: BlockNetwork) -> None:
    """Write a network as a checkpoint in DeepSpec's form, in float16."""
    shape = network.shape
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": shape.num_layers,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "vocab_size": shape.vocab_size,
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token,
        "target_layer_ids": list(shape.outputs_of),
        "markov_rank": shape.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": shape.has_confidence,
        "confidence_head_with_markov": shape.confidence_reads_markov,
    }
    tensors = {
        key: value.half() if value.is_floating_point() else value
        for key, value in network.state_dict().items()
    }
    write_heads(folder, FILE, config, tensors)


@lru_cache(maxsize=2)
def _opened(name: str, state: tuple[object, ...]) -> BlockCheckpoint:
    files = read_heads(Path(name), FILE, "block", speculators=SPECULATORS)
    shape = _shape_of(files)
    embedding = files.tensors.get(EMBEDDING)
    own = {key: tensor for key, tensor in files.tensors.items() if key not in NOT_READ}
    files = files._replace(tensors=own)
    with torch.device("meta"):
        files.check(BlockNetwork(shape).state_dict())
    files.check_tables(shape.draft_vocab_size)
    return BlockCheckpoint(shape, files, embedding)


def _shape_of(files: HeadFiles) -> BlockShape:
    """Read the shape from any of the forms, or raise ValueError naming an entry."""
    config, tensors = files.config, files.tensors
    layers: Mapping[str, Any] = config
    nested = config.get("dflash_config")
    if "speculators_model_type" in config:
        layers = config.get("transformer_layer_config") or {}
        inputs: Any = config.get("aux_hidden_state_layer_ids")
        outputs = [one - 1 for one in inputs] if _are_integers(inputs) else inputs
        mask, at_root = config.get("mask_token_id"), bool(config.get("sample_from_anchor", False))
    elif isinstance(nested, dict):
        outputs, mask, at_root = nested.get("target_layer_ids"), nested.get("mask_token_id"), False
    else:
        outputs, mask, at_root = config.get("target_layer_ids"), config.get("mask_token_id"), True
    block = config.get("block_size") or (nested or {}).get("block_size")
    if not _are_integers(outputs) or not outputs or min(outputs) < -1:
        files.refuse("target_layer_ids", outputs, "a list of layers of the target model")
    if type(block) is not int or block < 2:
        files.refuse("block_size", block, "an integer of 2 or more")
    shape = BlockShape.entries(layers, str(files.folder))
    vocab_size = files.number("vocab_size", layers)
    if type(mask) is not int or not 0 <= mask < vocab_size:
        files.refuse("mask_token_id", mask, f"a token, 0 to {vocab_size - 1}")
    rank = config.get("markov_rank") or 0
    kind = config.get("markov_head_type", "vanilla")
    if rank and kind != "vanilla":
        files.refuse("markov_head_type", kind, "vanilla")
    has_confidence = "confidence_head.proj.weight" in tensors
    return BlockShape(
        **shape,
        num_layers=files.number("num_hidden_layers", layers),
        vocab_size=vocab_size,
        draft_vocab_size=config.get("draft_vocab_size") or vocab_size,
        block_size=block,
        mask_token=mask,
        outputs_of=tuple(outputs),
        guesses_at_root=at_root,
        has_head=HEAD in tensors,
        markov_rank=rank,
        has_confidence=has_confidence,
        confidence_reads_markov=has_confidence and bool(config.get("confidence_head_with_markov")),
    )


def _are_integers(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)
