"""Triton's interpreter, which runs kernels for a GPU on a CPU, without what takes half of its time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest


def quick_interpreter(patch: pytest.MonkeyPatch) -> Any:
    """Make the interpreter quick until the patch is undone; return its module. Skip without Triton."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    remapped = set[str]()

    def call(self: Any, *given: Any, **named: Any) -> Any:
        if self.fn.__module__ not in remapped:
            remapped.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*given, **named)

    builder = interpreter.interpreter_builder
    # Places in tiny tensors fit into any integer; numbers that did not would be wrong, which is seen.
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    # The language is remapped once for the functions of a module, not at every call of one by a kernel.
    patch.setattr(interpreter.InterpretedFunction, "__call__", call)
    return interpreter
