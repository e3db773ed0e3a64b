"""Refuses sampled requests on vLLM's CPU build, where sampling and speculation together are wrong.

Its stand-in for a Triton kernel (`vllm/utils/cpu_triton_utils.py`, `_expand_kernel_impl`) writes
temperature, top-p and top-k of drafted tokens into a copy that is thrown away, so drafted tokens are
sampled with uninitialised values (0.32.0 was run, 0.33.0 was read). This holds for every speculative method,
also vLLM's own. On GPUs the kernel itself is used.
"""

from __future__ import annotations

from typing import Any

REASON = (
    "temperature: got {temperature}; allowed: 0. With speculative decoding, vLLM's CPU build samples "
    "from a wrong distribution (expanded temperatures are lost); serve without --speculative-config, "
    "or on a GPU"
)
_MARK = "_refused_by_token_recycling"


def is_needed() -> bool:
    """Return whether this is vLLM's CPU build."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def is_registered() -> bool:
    """Return whether sampled requests are refused in this process."""
    from vllm.sampling_params import SamplingParams

    return hasattr(SamplingParams._validate_spec_decode, _MARK)


def register() -> None:
    """Refuse sampled requests from now on; vLLM calls this in every process (`vllm.general_plugins`)."""
    if not is_needed() or is_registered():
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
