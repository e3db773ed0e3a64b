"""A copy of a model with short sliding windows, so that the self-test's short text exceeds them.

The model itself stays as it is: other threads may run it meanwhile. The copy has modules and a config
of its own, and the model's tensors.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..passes.masks import WINDOWS
from ..target import TargetModel
from .own_code import OwnCode, uncompiled

logger = logging.getLogger(__name__)

# Shorter than the self-test's prefix, so that no node sees its first tokens.
SHORT_WINDOW = 5


def with_short_windows(target: TargetModel) -> TargetModel:
    """Return a target like this one, of a copy of its model with windows of `SHORT_WINDOW` tokens.

    The caller holds the lock of the model's passes. It is the target itself if the model has no longer
    windows, is compiled, which would have to be done again, or cannot be copied.
    """
    names = [name for name in WINDOWS if (getattr(target.config, name, None) or 0) > SHORT_WINDOW]
    if not names or _has_compiled(target.model):
        return target
    try:
        model = structural_copy(target.model)
        config = model.config.get_text_config(decoder=True)
        for name in names:
            setattr(config, name, SHORT_WINDOW)
        return type(target)(model, target.use_kernels)
    # What a stranger's module holds may raise anything when it is copied.
    except Exception as error:
        kind = target.config.model_type
        logger.info("self-test of %s: keeps the windows as they are: %s", kind, error)
        return target


def structural_copy(model: nn.Module) -> Any:
    """Return a copy with modules and a config of its own, and with the tensors of the model.

    Methods that were set on a module belong to its copy, as they do after `copy.deepcopy`.

    Raises:
        ValueError: if other functions were set on modules, which would go on using the originals.
        Exception: whatever copying an attribute of a module raises.
    """
    tensors: dict[int, Any] = {id(one): one for one in (*model.parameters(), *model.buffers())}
    with _SharedTensors():
        copied = copy.deepcopy(model, tensors)
    own, others = (OwnCode.of(one).functions for one in (model, copied))
    if any(one is other for one, other in zip(own, others, strict=True)):
        raise ValueError("functions were set on its modules, and would use the originals in a copy")
    return copied


class _SharedTensors(TorchFunctionMode):
    """Within the block a deep copy of a tensor is that tensor: some are not among a model's buffers."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.__deepcopy__:
            return args[0]
        return function(*args, **(kwargs or {}))


def _has_compiled(model: nn.Module) -> bool:
    return uncompiled(model) is not model or any(
        vars(module).get("_compiled_call_impl") is not None for module in model.modules()
    )
