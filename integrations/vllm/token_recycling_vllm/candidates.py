"""Chains of the most probable next tokens, from all sources under one calibrated probability.

A candidate's weight is a product over the sources that name it (rows by one, two and three tokens,
the request's own text, texts of ended requests), normalised over the candidates and the outcome
"none of these". How often a guess of such a probability was right, by the sources that agreed, is
learned from what the model emits, drafted or not.

Sources: the library's hybrid, on a chain (`model.methods.hybrid`); its weights are used here as they
are. Log-linear pooling: Genest and Zidek 1986.

Shapes: B requests, K tokens of a chain, k successors in a row, M matches, C candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .row_tables import LONGEST, RowTables
from .text_index import LONGEST_MATCH

# Successors of a row that are candidates: a chain takes the best one, and it is seldom of a lower rank.
NUM_RANKS = 4
# Log weights: of a row's entry, of a match by its length, as in the library's hybrid.
ROW_OFFSET, ROW_SLOPE, FIRST_BONUS = 0.85, 0.25, 0.4
MATCH_OFFSET, MATCH_SLOPE = 1.0, 0.08
_STEPS = np.array([0, 1, 2, 3, 4, 5, 5, 6, 6, 7, 7, 7, 8, 8, 8, 8, *(9,) * 8, *(10,) * 9])
MATCH_WEIGHTS = MATCH_OFFSET + MATCH_SLOPE * _STEPS[: LONGEST_MATCH + 1]
# Edges and centres of buckets of probability.
EDGES = np.array([0.004, 0.01, 0.02, 0.04, 0.07, 0.12, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9])
CENTRES = np.array(
    [0.002, 0.007, 0.015, 0.03, 0.055, 0.093, 0.155, 0.25, 0.37, 0.52, 0.67, 0.82, 0.95]
)
# Kinds of guesses: which of rows, own text and history name the token, and the bucket.
NUM_AGREEMENTS = 8
# Observations that the initial rate of a kind counts for, and most that it is averaged over.
PRIOR_STRENGTH, MEMORY = 8.0, 400.0


class Chains(NamedTuple):
    """The likeliest chain of each request, arrays [B, K]."""

    tokens: np.ndarray
    probabilities: (
        np.ndarray
    )  # that a token and all before it are emitted; 0 where there is no guess
    kinds: np.ndarray  # of the guesses


class GuessRates:
    """How often guesses of each kind were right; the newest observations count most."""

    def __init__(self) -> None:
        self.rates = np.tile(CENTRES, NUM_AGREEMENTS)
        self._counts = np.full(len(self.rates), PRIOR_STRENGTH)

    def learn(self, kind: int, is_right: bool) -> None:
        count = self._counts[kind] = min(self._counts[kind] + 1.0, MEMORY)
        self.rates[kind] += (is_right - self.rates[kind]) / count


def best_chains(
    tables: RowTables,
    rates: GuessRates,
    contexts: np.ndarray,
    text_numbers: np.ndarray,
    matches: np.ndarray,
    match_lengths: np.ndarray,
    floor: float = 0.0,
) -> Chains:
    """Return the likeliest chain after each context.

    Args:
        tables: rows of likely next tokens.
        rates: acceptance of the kinds of guesses.
        contexts: last tokens of each text, [B, LONGEST].
        text_numbers: number of each text, [B].
        matches: tokens that followed at the matching places (own text, history), [B, 2, K]; -1: none.
        match_lengths: tokens that agree there, [B, 2].
        floor: probability below which no token is drafted; chains end when all are below it.
    """
    num_requests, _, depth = matches.shape
    tokens = np.zeros((num_requests, depth), dtype=np.int64)
    probabilities = np.zeros((num_requests, depth))
    kinds = np.zeros((num_requests, depth), dtype=np.int64)
    contexts, is_following = contexts.copy(), match_lengths > 0
    reached = np.ones(num_requests)
    everyone = np.arange(num_requests)
    for level in range(depth):
        following = np.where(is_following, matches[:, :, level], -1)  # [B, M]
        ids, log_weights = _candidates(
            tables, contexts, text_numbers, following, match_lengths + level
        )
        best, probability, is_from_rows = _pooled(ids, log_weights)
        chosen = ids[everyone, best]
        is_match = (following == chosen[:, None]) & (following >= 0)  # [B, M]
        bucket = np.searchsorted(EDGES, probability, side="right")
        agreement = is_from_rows + 2 * is_match[:, 0] + 4 * is_match[:, 1]
        kind = agreement * len(CENTRES) + bucket
        right = np.minimum(probability * rates.rates[kind] / CENTRES[bucket], 1.0)
        reached = reached * np.where(agreement > 0, right, 0.0)
        tokens[:, level], probabilities[:, level], kinds[:, level] = chosen, reached, kind
        is_following &= is_match
        if reached.max() <= floor:
            break
        contexts[:, :-1] = contexts[:, 1:]
        contexts[:, -1] = chosen
    return Chains(tokens, probabilities, kinds)


def _candidates(
    tables: RowTables,
    contexts: np.ndarray,
    text_numbers: np.ndarray,
    following: np.ndarray,
    match_lengths: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the candidates of every source and their log weights, -inf for none, each [B, C].

    The matches come last.
    """
    successors, shares = tables.read(contexts, text_numbers, NUM_RANKS)  # [B, LONGEST, NUM_RANKS]
    with np.errstate(divide="ignore"):
        of_rows = ROW_OFFSET + ROW_SLOPE * np.log(shares)
    of_rows[:, :, 0] += FIRST_BONUS
    lengths = np.minimum(match_lengths, LONGEST_MATCH)
    of_matches = np.where(following >= 0, MATCH_WEIGHTS[lengths], -np.inf)
    ids = np.concatenate((successors.reshape(len(contexts), -1), following), axis=1)
    weights = np.concatenate((of_rows.reshape(len(contexts), -1), of_matches), axis=1)
    return ids.astype(np.int64), weights


def _pooled(ids: np.ndarray, log_weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the place of the best candidate, its probability and whether rows name it, each [B]."""
    everyone = np.arange(len(ids))
    exists = np.isfinite(log_weights)
    is_same = (ids[:, :, None] == ids[:, None, :]) & exists[:, :, None] & exists[:, None, :]
    pooled = (is_same * np.where(exists, log_weights, 0.0)[:, None, :]).sum(axis=2)  # [B, C]
    is_first = is_same.argmax(axis=2) == np.arange(ids.shape[1])  # of equal candidates
    weights = np.where(exists & is_first, np.exp(pooled), 0.0)
    best = weights.argmax(axis=1)
    probability = weights[everyone, best] / (1.0 + weights.sum(axis=1))
    num_row_candidates = ids.shape[1] - 2
    is_from_rows = is_same[everyone, best, :num_row_candidates].any(axis=1)
    return best, probability, is_from_rows


assert LONGEST == 3  # the weights are those of rows by one, two and three tokens
