"""Chains from all sources, against a plain loop over dictionaries."""

from __future__ import annotations

import math

import numpy as np
from token_recycling_vllm.chains import (
    CENTRES,
    EDGES,
    FIRST_BONUS,
    MATCH_WEIGHTS,
    NUM_RANKS,
    ROW_OFFSET,
    ROW_SLOPE,
    GuessRates,
    best_chains,
)
from token_recycling_vllm.row_tables import LONGEST, NO_TOKEN, RowTables

VOCAB, K, DEPTH = 12, 5, 4


def best_chain(tables, rates, context, matches, match_lengths):
    """Return tokens, probabilities and kinds of one chain."""
    context, following = list(context), [length > 0 for length in match_lengths]
    reached, chain = 1.0, []
    for level in range(DEPTH):
        ids, shares = tables.read(np.array([context]), np.zeros(1, dtype=np.int64), K)
        weights: dict[int, float] = {}
        from_rows = set()
        for row in range(LONGEST):
            for rank in range(NUM_RANKS):
                share = float(shares[0, row, rank])
                if share > 0:
                    token = int(ids[0, row, rank])
                    weight = ROW_OFFSET + ROW_SLOPE * math.log(share) + FIRST_BONUS * (rank == 0)
                    weights[token] = weights.get(token, 0.0) + weight
                    from_rows.add(token)
        for source in range(2):
            if following[source] and matches[source][level] >= 0:
                token = int(matches[source][level])
                length = min(match_lengths[source] + level, 32)
                weights[token] = weights.get(token, 0.0) + MATCH_WEIGHTS[length]
        if not weights:
            break
        total = 1.0 + sum(map(math.exp, weights.values()))
        token = max(weights, key=lambda token: weights[token])
        probability = math.exp(weights[token]) / total
        bucket = int(np.searchsorted(EDGES, probability, side="right"))
        agree = [following[s] and int(matches[s][level]) == token for s in range(2)]
        kind = (int(token in from_rows) + 2 * agree[0] + 4 * agree[1]) * len(CENTRES) + bucket
        reached *= min(probability * rates.rates[kind] / CENTRES[bucket], 1.0)
        chain.append((token, reached, kind))
        following = agree
        context = [*context[1:], token]
    return chain


def test_chains_equal_those_of_a_plain_loop():
    rng = np.random.default_rng(0)
    tables, rates = RowTables(VOCAB, K, 12, share=True), GuessRates()
    contexts = rng.integers(0, VOCAB, (60, LONGEST))
    ids = np.stack([rng.permutation(VOCAB)[:K] for _ in contexts]).astype(np.int32)
    shares = np.sort(rng.dirichlet(np.ones(K) / 2, 60), axis=1)[:, ::-1].astype(np.float32)
    tables.write(contexts[:, [0, 1, 2]], np.zeros(60, dtype=np.int64), ids, shares)
    for kind in rng.integers(0, len(rates.rates), 300):
        rates.learn(int(kind), bool(rng.random() < 0.5))
    asked = np.concatenate(
        (contexts[:20], rng.integers(0, VOCAB, (20, LONGEST)), [[NO_TOKEN] * 2 + [3]])
    )
    matches = rng.integers(-1, VOCAB, (len(asked), 2, DEPTH))
    matches[:8] = -1
    lengths = rng.integers(0, 40, (len(asked), 2))
    lengths[:8] = 0
    found = best_chains(
        tables, rates, asked, np.zeros(len(asked), dtype=np.int64), matches, lengths
    )
    for index in range(len(asked)):
        expected = best_chain(tables, rates, asked[index], matches[index], lengths[index])
        length = int((found.probabilities[index] > 0).sum())
        assert length == len(expected)
        assert found.tokens[index, :length].tolist() == [token for token, _, _ in expected]
        assert np.allclose(found.probabilities[index, :length], [p for _, p, _ in expected])
        assert found.kinds[index, :length].tolist() == [kind for _, _, kind in expected]


def test_sources_that_agree_are_believed_more_and_rates_are_learned():
    tables, rates = RowTables(VOCAB, K, 12, share=True), GuessRates()
    row = np.array([[5, 6, 7, 8, 9]], np.int32), np.array([[0.4, 0.3, 0.1, 0.1, 0.1]], np.float32)
    numbers = np.zeros(1, dtype=np.int64)
    tables.write(np.array([[1, 2, 3]]), numbers, *row)

    def chance(token: int, length: int) -> float:
        matches = np.full((1, 2, 1), -1)
        matches[0, 0, 0] = token
        lengths = np.array([[length, 0]])
        chains = best_chains(tables, rates, np.array([[1, 2, 3]]), numbers, matches, lengths)
        assert chains.tokens[0, 0] == 5
        kinds.append(int(chains.kinds[0, 0]))
        return float(chains.probabilities[0, 0])

    kinds: list[int] = []
    assert chance(5, 8) > chance(5, 1) > chance(-1, 0)
    before = chance(5, 8)
    for _ in range(50):
        rates.learn(kinds[-1], False)
    assert chance(5, 8) < 0.3 * before
