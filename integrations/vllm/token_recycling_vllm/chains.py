"""Chains of the most probable next tokens, and how much of them pays at the measured cost of a step.

A candidate's weight is a product over the sources that name it (rows by one, two and three tokens,
the request's own text, texts of ended requests), normalised over the candidates and the outcome
"none of these". How often a guess of such a probability was right, by the sources that agreed, is
learned from what the model emits, drafted or not.

Every drafted token adds a row to the step of the whole batch. In a large batch rows cost what they
compute, and a guess pays only if it is likely; alone, a row is nearly free.

Sources: the library's hybrid, on a chain (`model.methods.hybrid`); its weights are used here as they
are. Log-linear pooling: Genest and Zidek 1986.

Shapes: B requests, K tokens of a chain, k successors in a row, M matches, C candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .requests import LONGEST_MATCH
from .row_tables import LONGEST, RowTables

# Successors of a row that are candidates: a chain takes the best one, and it is seldom of a lower rank.
NUM_RANKS = 4
# Log weights: of a row's entry, of a match by its length, as in the library's hybrid.
ROW_OFFSET, ROW_SLOPE, FIRST_BONUS = 0.85, 0.25, 0.4
MATCH_OFFSET, MATCH_SLOPE = 1.0, 0.08
assert LONGEST == 3  # the weights are those of rows by one, two and three tokens
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
# Steps without any draft after which one is drafted to learn what a row costs.
LONGEST_PAUSE = 64
# Drafting must promise this factor more tokens a millisecond than not drafting.
MARGIN = 1.01
# Share of what is known that is kept after a step.
_KEPT = 0.99
# Before anything is measured: shares of a step's time that do not depend on its size, that a request
# costs, and that a row costs.
_FIRST_GUESS = np.array([0.9, 0.05, 0.03])
# Steps that the first guess counts for.
_PRIOR_STRENGTH = 1.0
# A step that takes this many times as long as expected was disturbed, and is not learned.
_OUTLIER = 4.0


class Chains(NamedTuple):
    """The likeliest chain of each request, arrays [B, K]."""

    tokens: np.ndarray
    # That a token and all before it are emitted; 0 where there is no guess.
    probabilities: np.ndarray
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
        # Both [B, LONGEST, NUM_RANKS].
        successors, shares = tables.read(contexts, text_numbers, NUM_RANKS)
        with np.errstate(divide="ignore"):
            of_rows = ROW_OFFSET + ROW_SLOPE * np.log(shares)
        of_rows[:, :, 0] += FIRST_BONUS
        lengths = np.minimum(match_lengths + level, LONGEST_MATCH)
        of_matches = np.where(following >= 0, MATCH_WEIGHTS[lengths], -np.inf)
        # Candidates of all sources [B, C], the matches last; weights of -inf for none.
        ids = np.concatenate((successors.reshape(num_requests, -1), following), axis=1)
        log_weights = np.concatenate((of_rows.reshape(num_requests, -1), of_matches), axis=1)
        ids = ids.astype(np.int64)
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


class StepCost:
    """Milliseconds of a step, a + b * requests + c * rows, fitted to the newest steps."""

    def __init__(self) -> None:
        self._products = np.zeros((3, 3))
        self._sums = np.zeros(3)
        self._prior: np.ndarray | None = None
        self._fit = _FIRST_GUESS

    def learn(self, num_requests: int, num_rows: int, milliseconds: float) -> None:
        """Add a step that decoded `num_requests` requests, with `num_rows` rows of logits."""
        if self._prior is None:
            known = _FIRST_GUESS @ (1.0, num_requests, num_rows)
            self._prior = _FIRST_GUESS * (milliseconds / known)
        elif milliseconds > _OUTLIER * self.of(num_requests, num_rows):
            return
        step = np.array([1.0, num_requests, num_rows])
        self._products = _KEPT * self._products + np.outer(step, step)
        self._sums = _KEPT * self._sums + step * milliseconds
        strength = _PRIOR_STRENGTH * np.eye(3)
        fit = np.linalg.solve(self._products + strength, self._sums + strength @ self._prior)
        self._fit = np.maximum(fit, 1e-3 * self._prior)

    def of(self, num_requests: int, num_rows: int | np.ndarray) -> float | np.ndarray:
        """Return the milliseconds of a step; only their ratios mean something before one was measured."""
        fixed, of_request, of_row = self._fit
        return fixed + of_request * num_requests + of_row * num_rows


class DepthChooser:
    """Chooses the lengths of the drafts of a batch; if not `is_auto`, all guesses are drafted."""

    def __init__(self, is_auto: bool) -> None:
        self.cost = StepCost()
        self._is_auto = is_auto
        self._num_paused = 0

    def floor(self, num_requests: int) -> float:
        """Return the probability below which a token of a batch cannot pay."""
        if not self._is_auto:
            return 0.0
        fixed, one_more = (self.cost.of(num_requests, num_requests + more) for more in (0, 1))
        return float(num_requests * (one_more - fixed) / fixed)

    def lengths(self, probabilities: np.ndarray) -> np.ndarray:
        """Return how many tokens to draft for each request, [B], of these `Chains.probabilities` [B, K]."""
        if not self._is_auto:
            return (probabilities > 0).sum(axis=1)
        gains = np.sort(probabilities[probabilities > 0])[::-1]
        if not len(gains):
            return np.zeros(len(probabilities), dtype=np.int64)
        num_requests = len(probabilities)
        rows = num_requests + np.arange(len(gains) + 1)
        tokens = num_requests + np.concatenate(([0.0], np.cumsum(gains)))
        rate = tokens / self.cost.of(num_requests, rows)
        best = int(rate.argmax())
        if rate[best] < MARGIN * rate[0]:
            best = 0
        if best == 0:
            self._num_paused += 1
            if self._num_paused <= LONGEST_PAUSE:
                return np.zeros(num_requests, dtype=np.int64)
            best = min(num_requests, len(gains))
        self._num_paused = 0
        # Ties at the smallest gain may draft a few tokens more.
        return (probabilities >= gains[best - 1]).sum(axis=1)
