"""REST, retrieval-based speculative decoding (arXiv 2311.08252); and SSSD, which asks the text as well."""

from ...options import Words

WORDS = {
    "rest": Words(
        "REST",
        published="REST",
        options={
            "cut=none": "the most frequent tokens drafted",
            "cut=published": "long paths cut",
            "datastore": "the datastore {}",
            "draft_length": "at most {} tokens one after another",
            "max_matches": "at most {} places counted",
            "max_token_span": "ends of at most {} tokens looked up",
            "min_token_span": "ends of {} tokens or more looked up",
        },
    ),
    "sssd": Words(
        "SSSD",
        published="SSSD",
        options={"datastore": "the datastore {}"},
        variants={"budget=auto": "as many nodes as pay (ours)"},
    ),
}
