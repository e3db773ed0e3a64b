"""The candidate pool of the hybrid: the sources' candidates for the next token, pooled, and trees of the best.

C++ (`candidate_pool.cpp`) keeps the text and grows the trees; it reads and writes the arrays kept
here.

Shapes: N nodes, C tokens of a prompt chunk, k tokens in a row, S logit samples, V vocabulary.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

from ...budget.acceptance import MEMORY, AcceptanceRates
from ...budget.best_first import CENTRES, MINUS_EDGES, Growth, Guesses, address, flat, loaded
from ...budget.memory import check_tensor
from ...engine.tree import DraftTree
from ...engine.verification import Acceptance
from .tables import FIRST, LARGEST_LOGIT, LENGTH, NUM_CODES, NUM_STEPS, Neighbours, RowTables

# Weights of the pool, fitted on a 7M model and 120 Spec-Bench questions; flat around these values.
ROW_OFFSET, ROW_SLOPE, FIRST_BONUS = 0.85, 0.25, 0.4
MATCH_OFFSET, MATCH_SLOPE = 1.0, 0.08
IN_TEXT_WEIGHT = math.exp(0.4)
# Extra weight of a neighbour's row over a row found by tokens, by similarity of the states. Slopes
# of 1 to 3, and 0.3 more throughout, change the tokens per step by at most 0.2% (480 questions).
LIKENESS_SLOPE, LIKENESS_CENTRE = 2.0, 0.5
# Weight of a token that trained heads name, by the logarithm of its probability. On 24 questions (demo model, 8
# nodes) EAGLE-3's heads bring 2.30 to 2.39 tokens a step with offsets of 3 to 5 and slopes of 0.6 to 1.1.
GUIDE_OFFSET, GUIDE_SLOPE = 5.0, 0.8
# Weight of a match by its length m; longer ones count as the last.
MATCH_STEPS = (0, 1, 2, 3, 4, 5, 5, 6, 6, 7, 7, 7, 8, 8, 8, 8, *(9,) * 8, 10)
# Weight of a row's entry by its code: the bucket of its probability; the codes of first tokens come last.
ROW_WEIGHTS = tuple(
    math.exp(ROW_OFFSET + bonus) * centre**ROW_SLOPE
    for bonus in (0.0, FIRST_BONUS)
    for centre in (1.0, *CENTRES)
)
MATCH_WEIGHTS = tuple(math.exp(MATCH_OFFSET + MATCH_SLOPE * step) for step in MATCH_STEPS)
NEIGHBOUR_WEIGHTS = tuple(
    math.exp(LIKENESS_SLOPE * ((step + 0.5) / NUM_STEPS - LIKENESS_CENTRE))
    for step in range(NUM_STEPS)
)
# The acceptance rate at a pooled probability depends on which sources agree. A kind of guess is one
# of these and a bucket of the probability.
SOURCES = ("rows", "text", "rows and text")
NUM_BUCKETS = len(CENTRES)
KIND_CENTRES = CENTRES * len(SOURCES)
# The most frequent tokens are drafted where no source knows the context: few of them are accepted, but every
# verified node gives a row, so unused nodes of the budget would be wasted. Each rank is a kind.
NUM_FREQUENT = 8
FIRST_FREQUENT = len(KIND_CENTRES)
FREQUENT_PRIORS = tuple(0.05 / (1 + rank) for rank in range(NUM_FREQUENT))
# Tokens that the guide names are further kinds, in the order of the first ones.
FIRST_GUIDED = FIRST_FREQUENT + NUM_FREQUENT
KIND_SOURCES = (
    *(source for source in SOURCES for _ in CENTRES),
    *("frequent tokens" for _ in FREQUENT_PRIORS),
    *(source for source in ("guide", "guide and text", "guide and text") for _ in CENTRES),
)
SOURCE = Path(__file__).with_name("candidate_pool.cpp")
SHARED = SOURCE.with_name("sources.h")


@cache
def library_of_pool() -> ctypes.CDLL:
    return loaded(SOURCE, "the candidate pool of the hybrid (once, about 2 s)")


class CandidatePool(Growth):
    """All sources, and their learned acceptance.

    A node is compared with `num_neighbours` records.
    """

    sources = KIND_SOURCES

    def __init__(self, num_slots: int, k: int, vocab_size: int, num_neighbours: int = 0) -> None:
        self._vocab_size = vocab_size
        priors = KIND_CENTRES + FREQUENT_PRIORS + KIND_CENTRES
        self.tables = RowTables(num_slots, k)
        self.neighbours = Neighbours(num_neighbours, k, vocab_size)
        self._rates = AcceptanceRates(priors)
        # Of emitted tokens; C++ counts them and ranks the most frequent ones.
        self._counts = torch.zeros(vocab_size, dtype=torch.int32, device="cpu")
        num_records, num_probes = self.neighbours.arrays["before"].shape
        shared = {
            "num_slots": num_slots,
            "k": k,
            "vocab_size": vocab_size,
            "num_buckets": NUM_BUCKETS,
            "num_codes": NUM_CODES,
            "first_of_row": FIRST,
            "num_match_weights": len(MATCH_WEIGHTS),
            "num_frequent": NUM_FREQUENT,
            "first_frequent": FIRST_FREQUENT,
            "first_guided": FIRST_GUIDED,
            "num_kinds": len(self._rates.rates),
            "num_records": num_records,
            "num_probes": num_probes,
            "num_compared": num_neighbours,
            "num_steps": NUM_STEPS,
            "state_length": LENGTH,
            "in_text_weight": IN_TEXT_WEIGHT,
            "most_observations": MEMORY,
            "largest_logit": LARGEST_LOGIT,
            "guide_offset": GUIDE_OFFSET,
            "guide_slope": GUIDE_SLOPE,
            "minus_edges": np.array(MINUS_EDGES),
            "row_weights": np.array(ROW_WEIGHTS),
            "match_weights": np.array(MATCH_WEIGHTS),
            "kind_centres": np.array(priors),
            "neighbour_weights": np.array(NEIGHBOUR_WEIGHTS),
            "rates": self._rates.array,
            "counts": self._counts.numpy(),
            "frequent": np.full(NUM_FREQUENT, -1, dtype=np.int32),
            **self.tables.arrays,
            **self.neighbours.arrays,
        }
        super().__init__(library_of_pool(), "pool", SHARED.read_text(), shared)

    def write_rows(
        self,
        text: Sequence[int],
        begin: int,
        token_ids: Sequence[Sequence[int]],
        logits: Sequence[Sequence[float]],
        logit_samples: torch.Tensor | None = None,
    ) -> None:
        """Write rows for the tokens of a text from `begin` on: k tokens and logits each; logit samples [C, S]."""
        tokens, rows = array("i", text), flat("i", token_ids)
        values = flat("d", logits)
        self._library.pool_write_rows(
            *(self._source, address(tokens), begin, len(tokens), address(rows), address(values)),
            *_places(logit_samples),
        )

    def guide(self, guesses: Guesses) -> None:
        """Take what a guide says after the text, until the text goes on."""
        tokens, parents = array("i", guesses.tokens), array("i", guesses.parents)
        rows, values = flat("i", guesses.rows), flat("d", guesses.log_probabilities)
        self._library.pool_guide(
            *(self._source, len(tokens), len(guesses.rows[0])),
            *(address(tokens), address(parents), address(rows), address(values)),
        )

    def learn(self, tree: DraftTree, acceptance: Acceptance) -> None:
        """Learn from the last tree: acceptance of its guesses, rows (the accepted path's last), and new tokens."""
        tokens, parents = self.tokens, self.parents
        path, emitted = array("q", acceptance.path), array("i", acceptance.tokens)
        token_ids, logits = acceptance.candidates
        rows, values = flat("i", token_ids), flat("d", logits)
        self._library.pool_learn(
            *(self._source, tree.topology.num_nodes, address(tokens), address(parents)),
            *(address(path), len(path), address(emitted), len(emitted)),
            *(address(rows), address(values), len(token_ids[0])),
            *_places(acceptance.logit_samples),
        )

    def reset(self) -> None:
        self.tables.reset()
        self.neighbours.reset()
        self._rates.reset()
        self._counts.zero_()
        self._library.pool_reload(self._source)

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the rows, the states, the learned acceptance and the counts of tokens."""
        learned = {"rates": self._rates.state(), "counts": self._counts.clone()}
        return {**self.tables.memory(), **self.neighbours.memory(), **learned}

    def load_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load a `memory` as a whole or, with a ValueError if anything does not fit, not at all."""
        self.tables.check_memory(tensors, self._vocab_size)
        self.neighbours.check_memory(tensors)
        counts = tensors["counts"]
        check_tensor("matrix: got counts", counts, self._counts.dtype, self._counts.shape)
        if int(counts.min()) < 0:
            raise ValueError("matrix: holds counts below 0")
        self._rates.load_state(tensors["rates"])  # checks it, too
        self._counts.copy_(counts)
        self.tables.load_memory(tensors)
        self.neighbours.load_memory(tensors)
        self._library.pool_reload(self._source)


def _places(logit_samples: torch.Tensor | None) -> tuple[int | None, int, int]:
    """Return the address and strides of logit samples [N, S]; no address if there are none."""
    if logit_samples is None:
        return None, 0, 0
    return logit_samples.data_ptr(), logit_samples.stride(0), logit_samples.stride(1)
