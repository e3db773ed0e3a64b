"""Checkpoints of draft networks, as the authors publish them: `config.json` and one file of tensors.

Names and shapes are checked when a checkpoint is opened, before anything runs. The embedding that
some files repeat is not loaded: the target model's own is used.

Shapes: D hidden size, V vocabulary, Q tokens that can be drafted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ....machine.files import written_state
from ..head_files import HeadFiles, read_heads, write_heads
from .network import DraftNetwork, Eagle3Network, EagleNetwork
from .shape import NetworkShape

# Names of the file of tensors, without suffix; the second is that of pickles.
SAFE_NAME, PICKLE_NAME = "model", "pytorch_model"
# The target's input embedding, which the authors' training leaves as it is.
EMBEDDING = "embed_tokens.weight"
KINDS: Mapping[type[DraftNetwork], str] = {
    EagleNetwork: "EAGLE or EAGLE-2",
    Eagle3Network: "EAGLE-3",
}


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A checked checkpoint."""

    kind: type[DraftNetwork]
    shape: NetworkShape
    files: HeadFiles  # its folder, config and tensors, those of the network alone
    embedding: torch.Tensor | None  # the target's embedding [V, D] as stored; None if it is not

    def check_embedding(self, own: torch.Tensor) -> None:
        """Raise ValueError if the stored embedding is not the target's: other heads were trained for it."""
        if self.embedding is None:
            return
        some = slice(None, None, max(1, len(own) // 256))
        stored, now = (table[some].to("cpu", torch.float32) for table in (self.embedding, own))
        # Stored with fewer bits, perhaps: bfloat16 keeps eight.
        if stored.shape != now.shape or not torch.allclose(stored, now, rtol=0.02, atol=1e-3):
            raise ValueError(
                f"heads {self.files.folder}: were trained for another model, with another embedding; give the "
                "heads of this model"
            )


def open_checkpoint(name: str, kind: type[DraftNetwork]) -> Checkpoint:
    """Open and check a checkpoint; the last ones stay open while the files in their folders are unchanged.

    Raises:
        ValueError: if it does not exist, cannot be read, or holds another kind of network.
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
        key: value.half() if value.is_floating_point() else value
        for key, value in network.state_dict().items()
    }
    write_heads(folder, SAFE_NAME, network.shape.to_config(), tensors)


@lru_cache(maxsize=2)
def _opened(name: str, kind: Any, state: tuple[object, ...]) -> Checkpoint:
    folder = Path(name)
    is_safe = (folder / f"{SAFE_NAME}.safetensors").is_file()
    if folder.is_dir() and not is_safe and not (folder / f"{PICKLE_NAME}.bin").is_file():
        raise ValueError(
            f"heads {name}: has no {SAFE_NAME}.safetensors or {PICKLE_NAME}.bin; allowed: a folder with "
            f"{KINDS[kind]} heads"
        )
    files = read_heads(folder, SAFE_NAME if is_safe else PICKLE_NAME, KINDS[kind])
    shape = NetworkShape.from_config(files.config, name)
    for other, title in KINDS.items():
        if other is not kind and any(key.startswith(other.marker) for key in files.tensors):
            raise ValueError(f"heads {name}: are of {title}; allowed: heads of {KINDS[kind]}")
    with torch.device("meta"):
        wanted = kind(shape).state_dict()
        table = torch.empty(shape.vocab_size, shape.hidden_size)
    embedding = files.tensors.get(EMBEDDING)
    files.check(wanted if embedding is None else wanted | {EMBEDDING: table})
    _check_tables(files, shape)
    own = {key: tensor for key, tensor in files.tensors.items() if key != EMBEDDING}
    return Checkpoint(kind, shape, files._replace(tensors=own), embedding)


def _check_tables(files: HeadFiles, shape: NetworkShape) -> None:
    """Raise ValueError if the tables of an own vocabulary name other tokens than each other, or none."""
    if "d2t" not in files.tensors:
        return
    places = torch.arange(shape.draft_vocab_size)
    token_ids = places + files.tensors["d2t"].long()
    if not torch.equal(token_ids, files.tensors["t2d"].bool().nonzero()[:, 0]):
        raise ValueError(
            f"heads {files.folder}: tensors d2t and t2d name different tokens; allowed: i + d2t[i] is the place of "
            "the i-th true value in t2d; get the heads again"
        )
