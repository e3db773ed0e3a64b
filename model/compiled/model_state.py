"""Facts about a model, besides the numbers in its tensors, that captured graphs depend on."""

from __future__ import annotations

from typing import Any

from ..engine.own_code import OwnCode
from ..engine.passes.masks import WINDOWS
from ..engine.prefix_cache import active_adapters


class ModelState:
    """The addresses of a model's tensors, its windows, its active adapters and its hooks, now.

    Attributes:
        has_hooks: whether a module has hooks, other than those of `passes.hidden`, or a forward of its own.
    """

    def __init__(self, model: Any) -> None:
        self.has_hooks = bool(OwnCode.of(model).hooks) or any(
            "forward" in vars(module) for module in model.modules()
        )
        self._addresses = [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
        config = model.config.get_text_config(decoder=True)
        self._windows = [
            getattr(config, name, None) for name in WINDOWS
        ]  # a self-test shortens them
        self._adapters = active_adapters(model)

    def __eq__(self, other: object) -> bool:
        """Whether graphs captured in one state are right in the other."""
        return isinstance(other, ModelState) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]
