"""SpS: speculative sampling with a smaller draft model."""

from ...options import Words

WORDS = {
    "sps": Words(
        "Speculative sampling (draft model)",
        published="SpS",
        options={
            "draft_dtype": "draft model in precision {}",
            "num_draft_tokens": "{} tokens of the draft model a step",
        },
        variants={"budget=auto": "as many tokens as pay (ours)"},
    )
}
