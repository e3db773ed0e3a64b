"""Old import paths of Token Recycling: `model.recycling.tree_template_`.

Importing one puts this module where the package has its function `recycling`, so it can be called as that.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ..api import custom_generate


class _Callable(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> custom_generate.Speculative:
        """Return what the package's function `recycling` returns."""
        return custom_generate.recycling(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
