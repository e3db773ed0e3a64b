"""Checkpoints of trained heads: a folder with a config and a file of named tensors.

Everything is checked before a head runs: names and shapes of all tensors, by name.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ...kernels.linear import stored
from ...machine.files import atomic_write, refuse_lfs_pointer
from ...options import option

SUFFIXES = (".safetensors", ".pt", ".bin")
CONFIG = "config.json"
# Of a config; a valid one is far smaller.
MAX_BYTES = 2**20


class HeadFiles(NamedTuple):
    """The content of a checkpoint: its `config.json`, and tensors by name, on the CPU, as they were saved."""

    folder: Path
    config: Mapping[str, Any]
    tensors: dict[str, torch.Tensor]

    def number(self, key: str, part: Mapping[str, Any] | None = None) -> int:
        """Return a number of the config, or of a part of it, or raise ValueError if it is not an integer of 1 or
        more.
        """
        value = (self.config if part is None else part).get(key)
        if type(value) is not int or value < 1:
            self.refuse(key, value, "an integer of 1 or more")
        return value

    def refuse(self, key: str, value: object, allowed: str) -> NoReturn:
        """Raise ValueError for an entry of the config."""
        raise ValueError(
            f"heads {self.folder}: {CONFIG} has {key} {value!r:.80}; allowed: {allowed}"
        )

    def size_of(self, name: str, dimension: int) -> int:
        """Return a dimension of a matrix, or raise ValueError if it is missing, or no matrix."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.ndim != 2:
            found = "is missing" if tensor is None else f"has shape {list(tensor.shape)}"
            raise ValueError(f"heads {self.folder}: the tensor {name} {found}; allowed: a matrix")
        return tensor.shape[dimension]

    def check(self, expected: Mapping[str, torch.Tensor]) -> None:
        """Raise ValueError, naming the first that is missing, extra or wrongly shaped, unless the tensors fit."""
        for name in sorted(expected.keys() - self.tensors.keys()):
            raise ValueError(f"heads {self.folder}: the tensor {name} is missing")
        for name in sorted(self.tensors.keys() - expected.keys()):
            raise ValueError(
                f"heads {self.folder}: has a tensor {name}; allowed: the {len(expected)} that {CONFIG} describes"
            )
        for name, tensor in expected.items():
            if (found := self.tensors[name].shape) != tensor.shape:
                raise ValueError(
                    f"heads {self.folder}: the tensor {name} has shape {list(found)}; allowed: "
                    f"{list(tensor.shape)}"
                )

    def check_tables(self, num_places: int) -> None:
        """Raise ValueError if the tables of an own vocabulary of so many tokens name other ones than each other."""
        if "d2t" not in self.tensors:
            return
        token_ids = torch.arange(num_places) + self.tensors["d2t"].long()
        if not torch.equal(token_ids, self.tensors["t2d"].bool().nonzero()[:, 0]):
            raise ValueError(
                f"heads {self.folder}: tensors d2t and t2d name different tokens; allowed: i + d2t[i] is the place "
                "of the i-th true value in t2d; get the heads again"
            )

    def check_vocabulary(self, found: int | None, vocab_size: int) -> None:
        """Raise ValueError if the heads have a vocabulary, and it is not the target model's."""
        if found is not None and found != vocab_size:
            raise ValueError(
                f"heads {self.folder}: have a vocabulary of {found} tokens; allowed: {vocab_size}, as the "
                "target model; give heads that were trained for it"
            )

    def load_into(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Give a `meta` module the tensors, and return it to run; raises ValueError if a weight is not finite."""
        module.load_state_dict(self.tensors, assign=True)
        # A copy even where dtype and device are the same: mapped tensors change with their file.
        for name, parameter in module.named_parameters():
            parameter.data = parameter.data.to(device, dtype, copy=True)
            if not parameter.isfinite().all():
                raise ValueError(
                    f"heads {self.folder}: the tensor {name} has weights that are infinite or not numbers, in "
                    f"{dtype}; get the heads again, or use another dtype"
                )
        return module.eval().requires_grad_(False)


def check_embedding(folder: Path, stored: torch.Tensor | None, own: torch.Tensor) -> None:
    """Raise ValueError if an embedding that a checkpoint holds is not the target's: it is of another model."""
    if stored is None:
        return
    some = slice(None, None, max(1, len(own) // 256))
    before, now = (table[some].to("cpu", torch.float32) for table in (stored, own))
    # Stored with fewer bits, perhaps: bfloat16 keeps eight.
    if before.shape != now.shape or not torch.allclose(before, now, rtol=0.02, atol=1e-3):
        raise ValueError(
            f"heads {folder}: were trained for another model, with another embedding; give the heads of this model"
        )


def called(module: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Call an embedding or output head of the target model, which may be on another device."""
    place = stored(module).device
    # Offloaded weights (`meta`) are brought by the module's own hooks.
    found: torch.Tensor = module(inputs if place.type == "meta" else inputs.to(place))
    return found.to(inputs.device)


def write_heads(
    folder: Path, name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write a checkpoint that `read_heads` reads; each file is replaced whole."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    with atomic_write(folder / f"{name}.safetensors") as file:
        save_file(whole, file)
    with atomic_write(folder / CONFIG) as file:
        file.write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")


def heads_option(name: str) -> Any:
    return option(
        None, f"folder of the trained heads: {CONFIG} and {name}.safetensors or .pt (required)"
    )


def required(heads: str | None) -> str:
    """Return the folder that was given, or raise ValueError if none was."""
    if heads is None:
        raise ValueError(
            "heads: got none; give the folder of heads that were trained for this model"
        )
    return heads


def read_heads(folder: Path, name: str, method: str, speculators: Sequence[str] = ()) -> HeadFiles:
    """Read a checkpoint from `config.json` and NAME.safetensors or NAME.pt; raises ValueError if it cannot.

    `speculators`: types of the package speculators that the caller reads, too.
    """
    if not folder.is_dir():
        raise ValueError(f"heads: got {str(folder)!r}; allowed: a folder with {method} heads")
    found = [
        folder / (name + suffix) for suffix in SUFFIXES if (folder / (name + suffix)).is_file()
    ]
    if not found or not (folder / CONFIG).is_file():
        needed = CONFIG if found else f"{name}.safetensors or {name}.pt"
        raise ValueError(f"heads {folder}: has no {needed}; allowed: a folder with {method} heads")
    config = _read_config(folder / CONFIG)
    kind = config.get("speculators_model_type")
    if kind is not None and kind not in speculators:
        types = f", or its types {', '.join(speculators)}" if speculators else ""
        raise ValueError(
            f"heads {folder}: are in the format of the package speculators (its type {kind}), with other names "
            f"of tensors and settings; allowed: the format of the method's authors{types}"
        )
    return HeadFiles(folder, config, _read_tensors(found[0]))


def _read_config(file: Path) -> dict[str, Any]:
    refuse_lfs_pointer(file, f"heads {file.parent}: {file.name}")
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"has {file.stat().st_size} bytes")
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"heads {file.parent}: {file.name} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(
            f"heads {file.parent}: {file.name} holds no object; allowed: a JSON object"
        )
    return config


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Read named tensors; a pickle's code is never run."""
    refuse_lfs_pointer(file, f"heads {file.parent}: {file.name}")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        # Mapped: only what is used is read. Files of old versions of torch cannot be mapped.
        tensors = torch.load(file, "cpu", weights_only=True, mmap=is_zipfile(file))
    except (OSError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"heads {file.parent}: {file.name} cannot be read: {cause}") from error
    is_state = isinstance(tensors, dict) and all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in tensors.items()
    )
    if not is_state:
        raise ValueError(f"heads {file.parent}: {file.name} holds no named tensors")
    return dict(tensors)
