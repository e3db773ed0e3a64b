"""Plain decoding, with which the self-test compares drafts, of the model or of a copy with short windows.

Usually its logits are those of one pass over a sequence. Models with code of their own (`OwnCode`) are asked token
by
token: transformers' own generation is led along the sequence, and shows its logits.

The windows are short in the copy, so that the self-test's short sequence exceeds them. The model itself stays as it
is: other threads may run it meanwhile. The copy has modules and a config of its own, and the model's tensors.

Shapes: L tokens of a sequence, V vocabulary, n tokens of a path.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList

from ..passes.masks import WINDOWS
from ..target import TargetModel
from .snapshot import OwnCode
from .support import UnsupportedModelError, new_cache, uncompiled

# Copies of a sequence that are read side by side, to see how much rounding depends on the number of rows.
NUM_COPIES = 4


class PlainDecoding:
    """Plain decoding of a target's model.

    Args:
        target: the model.

    Attributes:
        is_stepwise: whether the model is read token by token, because it has code of its own.
    """

    def __init__(self, target: TargetModel) -> None:
        self._target = target
        self.is_stepwise = bool(OwnCode.of(target.model))

    def path_logits(self, prefix: Sequence[int], path: Sequence[int]) -> torch.Tensor:
        """Return the logits [n, V] after every token of a path, the first of which is the prompt's last."""
        if self.is_stepwise and self._generates:
            return self._generated(prefix, path)
        sequence = [*prefix, *path]
        num_single = len(path) if self._target.mixers else 0
        if self.is_stepwise:
            num_single = len(path) - 1
        return plain_logits(self._target, sequence, num_single)[len(prefix) :]

    def noise(self, prefix: Sequence[int], path: Sequence[int]) -> float:
        """Return the largest difference between logits of equal tokens that are read in other shapes."""
        if self.is_stepwise and self._generates:
            alone = self._generated(prefix, path)
            return float((alone - self._generated(prefix, path, NUM_COPIES)).abs().max())
        if self.is_stepwise:
            return 0.0  # such code may make the difference
        sequence = [*prefix, *path]
        alone = plain_logits(self._target, sequence, len(sequence) - 1)
        return float((alone - plain_logits(self._target, sequence)).abs().max())

    @property
    def _generates(self) -> bool:
        return isinstance(uncompiled(self._target.model), GenerationMixin)

    def _generated(
        self, prefix: Sequence[int], path: Sequence[int], num_copies: int = 1
    ) -> torch.Tensor:
        """Return the logits [n, V] of transformers' generation, led along a path.

        Raises:
            UnsupportedModelError: if it fails.
        """
        # Shares everything with the model; its settings, such as ends of the sequence, are the defaults.
        model: Any = copy.copy(uncompiled(self._target.model))
        model.generation_config = GenerationConfig()
        prompt = torch.tensor([[*prefix, path[0]]] * num_copies, device=self._target.device)

        def lead(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            place = token_ids.shape[1] - prompt.shape[1] + 1
            led = torch.full_like(scores, float("-inf"))
            led[:, path[place] if place < len(path) else 0] = 0
            return led

        try:
            output = GenerationMixin.generate(
                model,
                prompt,
                max_new_tokens=len(path),
                do_sample=False,
                logits_processor=LogitsProcessorList([lead]),
                return_dict_in_generate=True,
                output_logits=True,
            )
        # A model's own code may raise anything.
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            raise UnsupportedModelError(
                f"model type {self._target.config.model_type}: has hooks or functions of its own, and its own "
                f"generation fails: {type(error).__name__}: {reason}"
            ) from error
        return torch.stack([logits[0] for logits in output.logits]).to(self._target.device)


def plain_logits(
    target: TargetModel, token_ids: Sequence[int], num_single: int = 0
) -> torch.Tensor:
    """Return the logits [L, V] of plain decoding, float32: of one pass, and of one each for the last tokens.

    A fresh cache of the model's own: some versions of some models (Gemma 3n in transformers 4.57)
    compute something else without one.

    Args:
        target: the model.
        token_ids: the sequence, L tokens.
        num_single: how many of the last tokens are read alone.
    """
    cache = new_cache(target.model)
    cut = len(token_ids) - num_single
    parts = [token_ids[:cut], *([token] for token in token_ids[cut:])]
    read, logits = 0, []
    for part in parts:
        if part:
            ids = torch.tensor(part, device=target.device)
            logits.append(run_plainly(target, ids, read, cache))
            read += len(part)
    return torch.cat(logits).float()


def run_plainly(
    target: TargetModel, token_ids: torch.Tensor, base: int, cache: Any
) -> torch.Tensor:
    """Run the model as transformers does; in half precision with the norms of plain decoding."""
    with target.norms.of_pass(in_reference=True).patched():
        return target.run(token_ids, base, cache, None)


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
