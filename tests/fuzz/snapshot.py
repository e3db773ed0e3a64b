"""A model as it is at one time: modules, classes, attributes, hooks, configs and numbers, to be put back."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

# Set by `accelerate`, which is no change.
ACCELERATED = "generate"


class Snapshot:
    """Everything that a change may do to a model in place; what it does to classes is not here."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, type(module), _shallow(module)) for module in model.modules()]
        tensors = [*model.parameters(), *model.buffers()]
        self._tensors = [
            (tensor, tensor.data, tensor.detach().clone(), tensor.requires_grad)
            for tensor in tensors
        ]
        configs = (getattr(model, name, None) for name in ("config", "generation_config"))
        self._configs = [(config, copy.deepcopy(vars(config))) for config in configs if config]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, the numbers by writing them."""
        for module, kind, fields in self._modules:
            module.__class__ = kind
            now = module.__dict__
            for name in [name for name in now if name not in fields and name != ACCELERATED]:
                del now[name]
            for name, (value, entries) in fields.items():
                if name == ACCELERATED:
                    continue
                now[name] = value
                if entries is not None:
                    value.clear()
                    value.update(entries)
        for tensor, data, numbers, requires_grad in self._tensors:
            if tensor.data_ptr() != data.data_ptr() or tensor.dtype != data.dtype:
                tensor.data = data
            if not torch.equal(tensor, numbers):
                tensor.copy_(numbers)
            tensor.requires_grad_(requires_grad)
        for config, fields in self._configs:
            vars(config).clear()
            vars(config).update(copy.deepcopy(fields))


def _shallow(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return the attributes of a module, with the entries of those that are dictionaries."""
    return {
        name: (value, dict(value) if isinstance(value, dict) else None)
        for name, value in vars(module).items()
    }
