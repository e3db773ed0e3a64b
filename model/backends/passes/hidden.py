"""Hidden states of a pass, for drafters that read them: hooks capture them while the model runs.

The model stays unchanged: a hook on its decoder takes the final, normed hidden states, which the
output head reads, and hooks on its layers take what these read. They are there within
`HiddenStates.captured` alone, so that no other pass pays for them, and a kept sequence is not dropped as
that of a model with unknown hooks (`prefix_cache`). They pass by what other threads run. Decoder and
layers are found by their number and by watching one pass, and are not known by name.

Shapes: L rows of a pass, D hidden size, W layers wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from threading import get_ident
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ...machine.own_forwards import is_in_pass
from ..proofs.support import NO_HIDDEN, UnsupportedModelError, layers_of

# The layer whose "input" is the output head's: the final, normed hidden state.
FINAL = -1
_NONE: Mapping[str, Any] = MappingProxyType({})


class HiddenStates:
    """Captures hidden states of a causal LM's passes.

    Raises:
        UnsupportedModelError: if the model shows no such hidden states.
    """

    def __init__(
        self,
        model: nn.Module,
        num_layers: int,
        wanted: tuple[int, ...],  # `FINAL`, or i for the input of layer i; W of them
        device: torch.device,  # for the captured rows
        lock: Any,  # held while hooks are in the model
        # A plain pass over two tokens, with the last one's logits alone, as for prompts.
        run: Callable[[], Any],
    ) -> None:
        for layer in wanted:
            if not FINAL <= layer < num_layers:
                raise UnsupportedModelError(
                    f"hidden states: got layer {layer}; allowed: {FINAL} to {num_layers - 1} with this model"
                )
        self.wanted = wanted
        self._device, self._lock = device, lock
        self._thread: int | None = None  # the one that captures
        self._captured: dict[int, torch.Tensor] = {}
        name, self._layers = layers_of(model, num_layers)
        with lock:
            self._decoder = _decoder_of(model, name, run)
        with self.captured():
            run()
            self.take(num_rows=2)

    @property
    def is_capturing(self) -> bool:
        """Whether passes of this thread are captured now."""
        return self._thread == get_ident() and is_in_pass() is not False

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Within the block each pass of this thread leaves its hidden states for `take`."""
        with self._lock, ExitStack() as stack:
            self._thread = get_ident()
            stack.callback(setattr, self, "_thread", None)
            for layer in dict.fromkeys(self.wanted):
                if layer == FINAL:
                    handle = self._decoder.register_forward_hook(self._keep_output)
                else:
                    hook = self._keeping_input(layer)
                    handle = self._layers[layer].register_forward_pre_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def take(self, num_rows: int) -> torch.Tensor:
        """Return the hidden states of the last pass, [L, W * D], the layers side by side; forget them.

        Within `captured`, since another thread may capture as soon as it has ended.

        Args:
            num_rows: L.

        Raises:
            UnsupportedModelError: if the pass did not show them, or not those of all rows.
        """
        captured = self.pop()
        parts = []
        for layer in self.wanted:
            part = captured.get(layer)
            if part is None or len(part) != num_rows:
                found = "none" if part is None else f"{len(part)} rows"
                raise UnsupportedModelError(
                    f"hidden states: a pass over {num_rows} tokens shows {found} of layer {layer}; {NO_HIDDEN}"
                )
            parts.append(part.to(self._device))  # a model spread over devices has them on several
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def pop(self) -> dict[int, torch.Tensor]:
        """Return the rows of the last pass by layer, [L, D] each; forget them."""
        captured, self._captured = self._captured, {}
        return captured

    def put(self, rows: Mapping[int, torch.Tensor], count: int) -> None:
        """Leave the first `count` of these rows, from `pop`, for `take`; copied, since a graph overwrites them."""
        self._captured = {layer: part[:count].clone() for layer, part in rows.items()}

    def _keep_output(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._keep(FINAL, output)

    def _keeping_input(self, layer: int) -> Callable[..., None]:
        # A thread that found the hook just before it was removed calls it without the named arguments.
        def keep(
            module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any] = _NONE
        ) -> None:
            self._keep(layer, arguments or (named.get("hidden_states"),))

        return keep

    def _keep(self, layer: int, values: Any) -> None:
        if self.is_capturing and (rows := _rows_of(values)) is not None:
            self._captured[layer] = rows


def _rows_of(values: Any) -> torch.Tensor | None:
    """Return the rows [L, D] of arguments or outputs, whose first is [B, N, D] with B N = L; None if it is not."""
    rows = values[0]  # a tuple's and a transformers output's alike
    return rows.flatten(0, 1) if isinstance(rows, torch.Tensor) and rows.ndim == 3 else None


def _decoder_of(model: nn.Module, layers_name: str, run: Callable[[], Any]) -> nn.Module:
    """Return the module that gives the output head its rows: the outermost around the layers in a pass."""
    parts = layers_name.split(".")[:-1]
    called: list[nn.Module] = []
    thread = get_ident()

    def note(module: nn.Module, arguments: Any, output: Any) -> None:
        if get_ident() == thread and _rows_of(output) is not None:
            called.append(module)

    with ExitStack() as stack:
        for end in range(1, len(parts) + 1):
            around = model.get_submodule(".".join(parts[:end]))
            stack.callback(around.register_forward_hook(note).remove)
        run()
    if not called:
        raise UnsupportedModelError(
            f"hidden states: no module around the layers of {type(model).__name__} returns them; {NO_HIDDEN}"
        )
    return called[-1]  # the outermost returns last
