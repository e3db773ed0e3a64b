"""Token Recycling for vLLM: chains drafted from earlier logits and text, verified by vLLM itself.

    vllm serve MODEL --speculative-config '{"method": "custom_class",
        "model": "token_recycling_vllm.RecyclingProposer", "num_speculative_tokens": 5}'

vLLM is imported only where its classes are needed; the rest runs on numpy and torch alone.
"""

from .proposer import RecyclingProposer

__all__ = ["RecyclingProposer"]
