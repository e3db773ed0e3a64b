"""The drafter in an engine in small: right tokens, rows that are right or unknown, isolation, options."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from token_recycling_vllm.proposer import PluginOptions

from .engine import VOCAB, Engine, Job, continued


def jobs_of(rng: random.Random, count: int, most_new: int = 40) -> list[Job]:
    return [
        Job([rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))], rng.randrange(1, most_new))
        for _ in range(count)
    ]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 10**6), share=st.booleans(), depth=st.sampled_from(["auto", "full"]))
def test_every_learned_row_is_its_tokens_over_random_schedules(make_proposer, seed, share, depth):
    rng = random.Random(seed)
    proposer = make_proposer(share=share, depth=depth)
    jobs = jobs_of(rng, 12)
    engine = Engine(
        proposer, jobs, rng, most_running=rng.randrange(1, 6), chunk=rng.choice([7, 1000])
    )
    engine.run()
    assert all(job.text == continued(job.prompt, job.most_new) for job in jobs)
    counters = proposer.counters
    assert counters.wrong == 0 and counters.checked == counters.learned > 0


def test_most_rows_are_learned_in_spite_of_cuts(make_proposer):
    rng = random.Random(1)
    proposer = make_proposer(depth="full")
    Engine(proposer, jobs_of(rng, 60), rng, most_running=4, chunk=20).run()
    assert proposer.counters.learned > 0.7 * proposer.counters.rows


def test_a_known_text_is_decoded_in_far_fewer_steps(make_proposer):
    rng = random.Random(2)
    jobs = jobs_of(rng, 30, 60)
    proposer = make_proposer(depth="full")
    for job in jobs:
        Engine(proposer, [Job(job.prompt, job.most_new)]).run()
    engine = Engine(proposer, [Job(job.prompt, job.most_new) for job in jobs], most_running=1)
    engine.run()
    assert engine.num_steps < 0.4 * sum(job.most_new for job in jobs)


def test_equal_prompts_side_by_side_are_told_from_others(make_proposer):
    rng = random.Random(3)
    prompts = [job.prompt for job in jobs_of(rng, 3)]
    jobs = [Job(prompt, 50) for prompt in prompts for _ in range(3)]
    proposer = make_proposer()
    Engine(proposer, jobs, rng, most_running=9).run()
    assert proposer.counters.wrong == 0
    assert all(job.text == continued(job.prompt, 50) for job in jobs)


def test_requests_that_do_not_share_draft_as_if_alone(make_proposer):
    """What other requests said changes no draft, so acceptance tells nothing about them."""
    rng = random.Random(4)
    secret, own = jobs_of(rng, 8), Job([3, 1, 4], 60)

    def drafts_of(proposer, jobs) -> list:
        seen = []
        propose = proposer.propose

        def noting(sampled, lengths, texts, **named):
            drafts = propose(sampled, lengths, texts, **named)
            seen.extend(
                draft
                for place, draft in enumerate(drafts)
                if texts[place, : len(own.prompt)].tolist() == own.prompt
            )
            return drafts

        proposer.propose = noting
        Engine(proposer, jobs, most_running=1).run()
        return seen

    def new_jobs():
        return [Job(job.prompt, job.most_new) for job in secret]

    alone = drafts_of(make_proposer(share=False, depth="full"), [Job(own.prompt, 60)])
    after = drafts_of(make_proposer(share=False, depth="full"), [*new_jobs(), Job(own.prompt, 60)])
    shared = drafts_of(make_proposer(share=True, depth="full"), [*new_jobs(), Job(own.prompt, 60)])
    assert alone == after
    assert shared != alone


def test_memory_is_bounded(make_proposer):
    proposer = make_proposer(history_tokens=256)
    rng = random.Random(5)

    def size() -> list[int]:
        history = proposer._requests.history
        return [proposer._tables.num_bytes, history._tokens.nbytes, history._places.nbytes]

    before = size()
    Engine(proposer, jobs_of(rng, 200, 10), rng).run()
    for _ in range(200):
        proposer.propose([], np.zeros(1, np.int32), np.zeros((1, 4), np.int32))
    assert size() == before
    assert not proposer._requests._known


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topk": 4}, "token_recycling: got 'topk'; allowed: top_k, "),
        ({"top_k": 0}, "top_k: got 0; allowed: 1 to 64"),
        ({"depth": "deep"}, "depth: got 'deep'; allowed: auto, full"),
        ({"share": 1}, "share: got 1; allowed: true or false"),
        ({"load_matrix": ""}, "load_matrix: got ''"),
        ({"share": False, "save_matrix": "m"}, "share false, which has no common matrix"),
    ],
)
def test_a_wrong_option_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PluginOptions.read({"token_recycling": options})


def test_no_options_are_the_defaults():
    assert PluginOptions.read({}) == PluginOptions.read(None) == PluginOptions()
