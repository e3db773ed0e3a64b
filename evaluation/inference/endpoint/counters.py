"""Counters of drafting that a server shows at /metrics, in Prometheus' text form, by vLLM's names."""

from __future__ import annotations

import re
from collections.abc import Mapping

# A sample: name, labels in braces or none, value.
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? ([-+.\deE]+)")
# What vLLM counts, by the names of its per-request metrics.
COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "num_spec_steps",
    "vllm:spec_decode_num_draft_tokens_total": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "num_accepted_draft_tokens",
}


def read_counters(text: str) -> dict[str, int]:
    """Return the counters of drafting in a page of /metrics, summed over labels; empty if it has none."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        if (sample := SAMPLE.match(line)) and (name := COUNTERS.get(sample[1])):
            found[name] = found.get(name, 0) + int(float(sample[2]))
    return found if len(found) == len(COUNTERS) else {}


def difference(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return what was counted between two readings; empty if either has no counters."""
    return {name: after[name] - before[name] for name in after} if before and after else {}
