"""Loading a draft model: checked against the target's vocabulary before its weights load."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ...engine.target import TargetModel
from ...machine.files import written_state


def check_draft_model(name: str, vocab_size: int) -> None:
    """Check a draft model as far as possible without its weights.

    Raises:
        ValueError: if it does not exist, or its vocabulary size is not the target model's.
    """
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1
    if looks_local and not Path(name).is_dir():
        raise ValueError(
            f"draft_model: got {name!r}; allowed: a folder with a model, or a hub name ORG/NAME"
        )
    config = _read(AutoConfig.from_pretrained, name)
    found = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if found != vocab_size:
        raise ValueError(
            f"draft_model {name}: has a vocabulary of {found} tokens; allowed: {vocab_size}, as the "
            "target model; give a smaller model of the same family"
        )


def load_draft_model(name: str, dtype: str, device: torch.device) -> TargetModel:
    """Load a draft model; the last one stays loaded while the files in its folder are unchanged.

    Raises:
        ValueError: if its weights cannot be loaded, or its cache cannot be rolled back.
    """
    # Make the index explicit: "cuda" and "cuda:0" are one device.
    return _loaded(name, dtype, torch.empty(0, device=device).device, written_state(name))


@lru_cache(maxsize=1)
def _loaded(name: str, dtype: str, device: torch.device, state: tuple[object, ...]) -> TargetModel:
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "float16"
    model = _read(AutoModelForCausalLM.from_pretrained, name, dtype=getattr(torch, dtype))
    draft = TargetModel(model.eval().to(device))
    if draft.mixers:
        raise ValueError(
            f"draft_model {name}: keeps recurrent state; allowed: attention only, whose cached "
            "rows can be dropped"
        )
    return draft


def _read(load: Callable[..., Any], name: str, **options: object) -> Any:
    """Load a part of a draft model; raises ValueError."""
    try:
        return load(name, **options)
    # transformers raises many types of errors for a missing, broken or unknown model.
    except Exception as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"draft_model {name}: cannot be loaded: {cause}") from error
