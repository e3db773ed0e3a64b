"""Checkpoints of draft networks, as the authors publish them: `config.json` and one file of tensors.

Names and shapes are checked when a checkpoint is opened, before anything runs. The embedding that
some files repeat is not loaded: the target model's own is used.

Shapes: D hidden size, V vocabulary, Q tokens that can be drafted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ...machine.files import atomic_write, written_state
from .network import DraftNetwork, Eagle3Network, EagleNetwork
from .shape import NetworkShape

CONFIG = "config.json"
# Files of tensors, in the order in which they are looked for.
TENSOR_FILES = ("model.safetensors", "pytorch_model.bin")
# The target's input embedding, which the authors' training leaves as it is.
EMBEDDING = "embed_tokens.weight"
KINDS: Mapping[type[DraftNetwork], str] = {
    EagleNetwork: "EAGLE or EAGLE-2",
    Eagle3Network: "EAGLE-3",
}


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A checked checkpoint.

    Attributes:
        name: folder or hub name.
        kind: of network.
        shape: of its network.
        tensors: by name, those of the network alone.
        embedding: the target's embedding [V, D] as stored; None if it is not.
    """

    name: str
    kind: type[DraftNetwork]
    shape: NetworkShape
    tensors: Mapping[str, torch.Tensor]
    embedding: torch.Tensor | None

    def check_embedding(self, own: torch.Tensor) -> None:
        """Check that the stored embedding is the target's, so that these heads were trained for it.

        Raises:
            ValueError: if it is another.
        """
        if self.embedding is None:
            return
        some = slice(None, None, max(1, len(own) // 256))
        stored, now = (table[some].to("cpu", torch.float32) for table in (self.embedding, own))
        # Stored with fewer bits, perhaps: bfloat16 keeps eight.
        if stored.shape != now.shape or not torch.allclose(stored, now, rtol=0.02, atol=1e-3):
            raise ValueError(
                f"heads {self.name}: were trained for another model, with another embedding; give the heads "
                "of this model"
            )


def open_checkpoint(name: str, kind: type[DraftNetwork]) -> Checkpoint:
    """Open and check a checkpoint; the last ones stay open while the files in their folders are unchanged.

    Args:
        name: folder, or hub name ORG/NAME.
        kind: of network that is wanted.

    Raises:
        ValueError: if it does not exist, cannot be read, or holds another network.
    """
    key: Any = kind  # mypy takes a module's __hash__ for its class's
    opened: Checkpoint = _opened(name, key, written_state(name))
    return opened


@lru_cache(maxsize=2)
def build_network(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> DraftNetwork:
    """Return the network of a checkpoint on a device, for inference."""
    with torch.device("meta"):
        network = checkpoint.kind(checkpoint.shape)
    tensors = {
        key: value.to(device, dtype) if value.is_floating_point() else value.to(device)
        for key, value in checkpoint.tensors.items()
    }
    network.load_state_dict(tensors, assign=True)
    return network.requires_grad_(False).eval()


def write_checkpoint(folder: Path, network: DraftNetwork) -> None:
    """Write a network as a checkpoint, in float16."""
    tensors = {
        key: value.half() if value.is_floating_point() else value
        for key, value in network.state_dict().items()
    }
    with atomic_write(folder / TENSOR_FILES[0]) as file:
        save_file(tensors, file)
    with atomic_write(folder / CONFIG) as file:
        text = json.dumps(network.shape.to_config(), indent=2) + "\n"
        file.write_text(text, encoding="utf-8")


@lru_cache(maxsize=2)
def _opened(name: str, kind: Any, state: tuple[object, ...]) -> Checkpoint:
    folder = _folder_of(name)
    shape = NetworkShape.from_config(_read_config(folder, name), name)
    tensors = _read_tensors(folder, name)
    embedding = tensors.pop(EMBEDDING, None)
    with torch.device("meta"):
        wanted = kind(shape).state_dict()
    _check_names(name, tensors, wanted, kind)
    expected = {key: tensor.shape for key, tensor in wanted.items()}
    found = dict(tensors)
    if embedding is not None:
        expected[EMBEDDING] = torch.Size((shape.vocab_size, shape.hidden_size))
        found[EMBEDDING] = embedding
    for key, size in expected.items():
        if found[key].shape != size:
            raise ValueError(
                f"heads {name}: tensor {key} has shape {list(found[key].shape)}; allowed: {list(size)}, as "
                "config.json says"
            )
    _check_vocabulary(name, tensors, shape)
    return Checkpoint(name, kind, shape, tensors, embedding)


def _folder_of(name: str) -> Path:
    """Return the folder of a checkpoint, downloaded if it is a hub name."""
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1
    if Path(name).is_dir():
        return Path(name)
    if looks_local:
        raise ValueError(
            f"heads: got {name!r}; allowed: a folder with {CONFIG} and {' or '.join(TENSOR_FILES)}, or a hub "
            "name ORG/NAME"
        )
    try:
        return Path(snapshot_download(name, allow_patterns=[CONFIG, *TENSOR_FILES]))
    # The hub's client raises many types of errors for a missing repository or network.
    except Exception as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"heads {name}: cannot be loaded: {cause}") from error


def _read_config(folder: Path, name: str) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"heads {name}: {CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(
            f"heads {name}: {CONFIG} holds {type(config).__name__}; allowed: an object"
        )
    return config


def _read_tensors(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, on the CPU."""
    file = next((folder / one for one in TENSOR_FILES if (folder / one).is_file()), None)
    if file is None:
        raise ValueError(
            f"heads {name}: has neither of {', '.join(TENSOR_FILES)}; give such a folder"
        )
    try:
        if file.suffix == ".safetensors":
            tensors = load_file(file)
        else:  # tensors alone: code in a pickle does not run
            tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, EOFError, UnpicklingError, SafetensorError) as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"heads {name}: {file.name} cannot be read: {cause}") from error
    is_table = isinstance(tensors, dict) and all(
        isinstance(one, torch.Tensor) for one in tensors.values()
    )
    if not is_table:
        raise ValueError(f"heads {name}: {file.name} holds no table of tensors; give other heads")
    return dict(tensors)


def _check_names(
    name: str,
    tensors: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    kind: type[DraftNetwork],
) -> None:
    """Raise ValueError if a checkpoint lacks a tensor, or has one that the network has not."""
    for other, title in KINDS.items():
        if other is not kind and any(key.startswith(other.marker) for key in tensors):
            raise ValueError(f"heads {name}: are of {title}; allowed: heads of {KINDS[kind]}")
    for key in wanted:
        if key not in tensors:
            raise ValueError(f"heads {name}: lack the tensor {key}; give heads of {KINDS[kind]}")
    for key in tensors:
        if key not in wanted:
            raise ValueError(
                f"heads {name}: have a tensor {key}, which {KINDS[kind]} has not; give other heads"
            )


def _check_vocabulary(name: str, tensors: Mapping[str, torch.Tensor], shape: NetworkShape) -> None:
    """Raise ValueError if the tables of an own vocabulary name other tokens than each other, or none."""
    if "d2t" not in tensors:
        return
    places = torch.arange(shape.draft_vocab_size)
    token_ids, can_draft = places + tensors["d2t"].cpu().long(), tensors["t2d"].cpu().bool()
    is_inside = bool(((token_ids >= 0) & (token_ids < shape.vocab_size)).all())
    if not is_inside or not torch.equal(token_ids, can_draft.nonzero()[:, 0]):
        raise ValueError(
            f"heads {name}: tensors d2t and t2d name different tokens; allowed: places in t2d, less their "
            "number, in d2t"
        )
