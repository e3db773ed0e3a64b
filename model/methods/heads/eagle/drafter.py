"""EAGLE, EAGLE-2, EAGLE-3: a one-layer network continues the target's hidden states, and guesses tokens from them.

The target's hidden states say more about the next tokens than its tokens do. The draft network reads
them with the embedding of each next token, and writes the state from which the token after it is
guessed by an output head. A tree is drafted level by level; drafted nodes read their parents'
states. After a step the rows of the accepted tokens are read again, from the target's true states.

EAGLE fills a fixed tree with the likeliest tokens. EAGLE-2 lets the tree follow the probabilities:
on each level it reads the most probable nodes, and keeps the most probable of all candidates.
EAGLE-3 drafts the same tree with another network: it reads states of three layers, and was trained
on its own guesses.

Sources: Y. Li et al., EAGLE, arXiv 2401.15077; EAGLE-2, arXiv 2406.16858 (k -> `width`, m ->
`num_nodes`); EAGLE-3, arXiv 2503.01840. The authors' code is github.com/SafeAILab/EAGLE
(`total_token` - 1 -> `num_nodes`, `depth` + 1 -> `depth`, `top_k` -> `width`).

Shapes: N nodes, C prompt tokens in a chunk, W hidden states side by side, D hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from ....backends.passes.hidden import FINAL
from ....backends.target import TargetModel
from ....budget.best_first import Guesses
from ....engine.budget import MAX_DRAFT, DraftBudget
from ....engine.drafter import Needs
from ....engine.tree import DraftTree
from ....machine.files import written_state
from ....options import Options, option
from ..drafter import HeadDrafter, StateReader
from ..head_files import HeadFiles, check_embedding, read_heads, required, write_heads
from .network import (
    NUM_FUSED,
    DraftNetwork,
    Eagle3Network,
    EagleNetwork,
    NetworkShape,
    ParallelNetwork,
)
from .trees import (
    PATHS,
    DraftText,
    Grown,
    ReplayedText,
    fixed_shape,
    grow_fixed,
    grow_likeliest,
    likely_rows,
)

# Names of the file of tensors, without suffix; the second is that of pickles.
SAFE_NAME, PICKLE_NAME = "model", "pytorch_model"
# The target's input embedding, which the authors' training leaves as it is.
EMBEDDING = "embed_tokens.weight"
KINDS: Mapping[type[DraftNetwork], str] = {
    EagleNetwork: "EAGLE or EAGLE-2",
    Eagle3Network: "EAGLE-3",
    ParallelNetwork: "P-EAGLE",
}
# Types of checkpoints of the package speculators.
SPECULATORS: Mapping[type[DraftNetwork], tuple[str, ...]] = {
    EagleNetwork: (),
    Eagle3Network: ("eagle3",),
    ParallelNetwork: ("peagle",),
}
# Names of a network's layers in speculators and here: of the first, and of later ones.
FIRST, FIRST_HERE = "layers.0.", Eagle3Network.marker
LATER, LATER_HERE = re.compile(r"^layers\.(\d+)\."), re.compile(r"^following\.(\d+)\.")
HEADS = (
    "folder of the trained heads: config.json and model.safetensors or pytorch_model.bin (required)"
)
NODES, DEPTH = "drafted nodes of a step", "levels of the tree below its root"
WIDTH = "nodes read on each level, and tokens guessed after each"
# Levels of a tree: each takes a pass of the draft network.
MAX_DEPTH = 64
# Levels of guesses for another drafter, and nodes read on each.
GUIDE_DEPTH, GUIDE_WIDTH = 6, 10


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    kind: type[DraftNetwork]
    shape: NetworkShape
    files: HeadFiles  # its folder, config and tensors, those of the network alone
    embedding: torch.Tensor | None  # the target's embedding [V, D] as stored; None if it is not


def open_checkpoint(name: str, kind: type[DraftNetwork]) -> Checkpoint:
    """Open a checkpoint, or raise ValueError if it cannot be read, or holds another kind of network.

    The last ones stay open while the files in their folders are unchanged.
    """
    key: Any = kind  # mypy takes a module's __hash__ for its class's
    opened: Checkpoint = _opened(name, key, written_state(name))
    return opened


@lru_cache(maxsize=2)
def build_network(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> DraftNetwork:
    """Return the network of a checkpoint on a device, for inference."""
    with torch.device("meta"):
        network = checkpoint.kind(checkpoint.shape)
    checkpoint.files.load_into(network, dtype, device)
    return network.to(device)  # tables of tokens too


def write_checkpoint(folder: Path, network: DraftNetwork) -> None:
    """Write a network as a checkpoint, in float16."""
    tensors = {
        _name_there(key, network): value.half() if value.is_floating_point() else value
        for key, value in network.state_dict().items()
    }
    write_heads(folder, SAFE_NAME, network.shape.to_config(), tensors)


def _name_there(key: str, network: DraftNetwork) -> str:
    """Return the name of a tensor in a checkpoint; P-EAGLE's are those of speculators."""
    if not isinstance(network, ParallelNetwork):
        return key
    if key.startswith(FIRST_HERE):
        return FIRST + key.removeprefix(FIRST_HERE)
    return LATER_HERE.sub(lambda found: f"layers.{int(found[1]) + 1}.", key)


def _name_here(key: str) -> str:
    """Return the name here of a tensor in a checkpoint of speculators."""
    if key.startswith(FIRST):
        return FIRST_HERE + key.removeprefix(FIRST)
    return LATER.sub(lambda found: f"following.{int(found[1]) - 1}.", key)


@lru_cache(maxsize=2)
def _opened(name: str, kind: Any, state: tuple[object, ...]) -> Checkpoint:
    folder = Path(name)
    is_safe = (folder / f"{SAFE_NAME}.safetensors").is_file()
    if folder.is_dir() and not is_safe and not (folder / f"{PICKLE_NAME}.bin").is_file():
        raise ValueError(
            f"heads {name}: has no {SAFE_NAME}.safetensors or {PICKLE_NAME}.bin; allowed: a folder with "
            f"{KINDS[kind]} heads"
        )
    name_of_file = SAFE_NAME if is_safe else PICKLE_NAME
    files = read_heads(folder, name_of_file, KINDS[kind], SPECULATORS[kind])
    if "speculators_model_type" in files.config:
        renamed = {
            _name_here(key): tensor
            for key, tensor in files.tensors.items()
            if not key.startswith("verifier_")
        }
        files = files._replace(tensors=renamed)
    shape = NetworkShape.from_config(files.config, name)
    for other, title in KINDS.items():
        is_other = not issubclass(kind, other)
        if is_other and any(key.startswith(other.marker) for key in files.tensors):
            raise ValueError(f"heads {name}: are of {title}; allowed: heads of {KINDS[kind]}")
    with torch.device("meta"):
        wanted = kind(shape).state_dict()
        table = torch.empty(shape.vocab_size, shape.hidden_size)
    # P-EAGLE's is its own.
    embedding = None if EMBEDDING in wanted else files.tensors.get(EMBEDDING)
    files.check(wanted if embedding is None else wanted | {EMBEDDING: table})
    files.check_tables(shape.draft_vocab_size)
    own = {key: tensor for key, tensor in files.tensors.items() if key in wanted}
    return Checkpoint(kind, shape, files._replace(tensors=own), embedding)


@dataclass(frozen=True, slots=True)
class EagleConfig(Options):
    heads: str | None = option(None, HEADS)
    num_nodes: int = option(len(PATHS), NODES, least=1, most=len(PATHS))


@dataclass(frozen=True, slots=True)
class Eagle2Config(Options):
    heads: str | None = option(None, HEADS)
    num_nodes: int = option(59, NODES, least=1, most=MAX_DRAFT)
    depth: int = option(6, DEPTH, least=1, most=MAX_DEPTH)
    width: int = option(10, WIDTH, least=1, most=MAX_DRAFT)


@dataclass(frozen=True, slots=True)
class Eagle3Config(Eagle2Config):
    depth: int = option(8, DEPTH, least=1, most=MAX_DEPTH)


class NetworkDrafter(HeadDrafter, StateReader[DraftText]):
    """Base of the three: a draft network on the text, from which subclasses grow a tree.

    Raises:
        ValueError: if the checkpoint is missing, cannot be read or does not fit the model.
    """

    kind: ClassVar[type[DraftNetwork]] = EagleNetwork
    # Of Eagle3Network until the number of the model's layers is known.
    hidden_layers: ClassVar[tuple[int, ...]] = (FINAL,)

    def __init__(self, config: Any, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        self._checkpoint = open_checkpoint(required(config.heads), self.kind)
        shape = self._checkpoint.shape
        self._checkpoint.files.check_vocabulary(shape.vocab_size, vocab_size)
        self.needs = Needs(hidden_layers=self.hidden_layers, hidden_size=shape.hidden_size)
        self.max_nodes = 1 + self.num_drafted

    @property
    def num_drafted(self) -> int:
        """The most nodes of a draft below its root."""
        count: int = self.config.num_nodes
        return count

    @classmethod
    def write_untrained_heads(cls, folder: Path, config: Any) -> None:
        cls.write_untrained(folder, config)

    @classmethod
    def write_untrained(cls, folder: Path, config: Any, **more: Any) -> None:
        """Write a random network for a model with this text config; `more` as of `NetworkShape`."""
        size, vocab_size = config.hidden_size, config.vocab_size
        is_fused = issubclass(cls.kind, Eagle3Network)
        shape = NetworkShape(
            hidden_size=size,
            intermediate_size=2 * size,
            num_heads=1,
            num_key_value_heads=1,
            head_dim=size,
            vocab_size=vocab_size,
            draft_vocab_size=vocab_size,
            hidden_layers=(0,) * NUM_FUSED if is_fused else (),  # any model has this one
            **more,
        )
        write_checkpoint(folder, cls.kind(shape))

    @torch.inference_mode()
    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        text = self.read_text()
        grown = self.grow(text, budget) if text and budget.max_depth else None
        if grown is None:  # such as after a prompt of one token: no hidden states come before it
            return DraftTree.chain(context[-1:])
        return DraftTree.from_lists([context[-1], *grown.tokens], (-1, *grown.parents))

    @torch.inference_mode()
    def guesses(self, context: Sequence[int], budget: DraftBudget) -> Guesses | None:
        text = self.read_text()
        depth = min(GUIDE_DEPTH, budget.max_depth)
        if text is None or not depth:
            return None
        return likely_rows(text, context[-1], depth, 1 if budget.chain_only else GUIDE_WIDTH)

    def grow(self, text: DraftText, budget: DraftBudget) -> Grown | None:
        """Return a tree without its root, None if nothing was read; `budget.max_depth` is at least 1."""
        raise NotImplementedError

    def describe(self) -> str:
        parameters = sum(tensor.numel() for tensor in self._checkpoint.files.tensors.values())
        return f"draft network of {parameters / 1e6:.1f}M parameters"

    def _text_of(self, target: TargetModel) -> DraftText:
        embedding = target.model.get_input_embeddings()
        head = target.model.get_output_embeddings()
        if head is None:
            raise ValueError("model: has no output head of its own; use a method without heads")
        checkpoint = self._checkpoint
        check_embedding(checkpoint.files.folder, checkpoint.embedding, embedding.weight)
        network = build_network(checkpoint, target.device, target.dtype)
        if target.is_replayed:
            return ReplayedText(network, embedding, head, target)
        return DraftText(network, embedding, head, target.device)


class FusingDrafter(NetworkDrafter):
    """Base of those whose network reads the states of three layers."""

    hidden_layers = (FINAL,) * NUM_FUSED  # until the number of the model's layers is known

    def check_config(self, config: Any) -> None:
        """Choose the layers whose inputs are fused, by the number of the model's layers, and check them."""
        super().check_config(config)
        count = config.num_hidden_layers
        named = self._checkpoint.shape.hidden_layers
        layers = named or (2, count // 2, count - 3)
        if len(layers) != NUM_FUSED or not all(0 <= layer < count for layer in layers):
            raise ValueError(
                f"heads {self.config.heads}: read the inputs of layers {', '.join(map(str, layers))}; allowed: "
                f"{NUM_FUSED} of 0 to {count - 1}, the model's"
            )
        self.needs = replace(self.needs, hidden_layers=layers)


class EagleDrafter(NetworkDrafter):
    config_class = EagleConfig

    def grow(self, text: DraftText, budget: DraftBudget) -> Grown | None:
        depth = min(budget.max_depth, max(map(len, PATHS)))
        shape = fixed_shape(self.config.num_nodes, depth, budget.chain_only)
        return grow_fixed(text, shape)


class Eagle2Drafter(NetworkDrafter):
    """Drafts the most probable nodes with EAGLE's network."""

    heads_of = "eagle"
    config_class: ClassVar[type] = Eagle2Config

    def __init__(self, config: Any, vocab_size: int, device: torch.device) -> None:
        depth, width = config.depth, config.width
        most = width + (depth - 1) * width * width
        if config.num_nodes > most:
            raise ValueError(
                f"num_nodes: got {config.num_nodes}; allowed: 1 to {most}, the candidates of {depth} levels "
                f"{width} wide"
            )
        super().__init__(config, vocab_size, device)

    def grow(self, text: DraftText, budget: DraftBudget) -> Grown | None:
        """Return the most probable nodes; where only a chain is allowed, the likeliest tokens in turn."""
        depth = min(self.config.depth, budget.max_depth)
        width = 1 if budget.chain_only else self.config.width
        return grow_likeliest(text, self.config.num_nodes, depth, width)


class Eagle3Drafter(FusingDrafter, Eagle2Drafter):
    """Drafts EAGLE-2's tree with EAGLE-3's network."""

    heads_of = ""
    config_class = Eagle3Config
    kind = Eagle3Network
