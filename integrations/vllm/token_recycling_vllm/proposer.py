"""The drafter that vLLM calls: learns from the step that ended, drafts for the next one.

Shapes: B requests of a batch, R rows of logits, K tokens of a chain, k successors in a row.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import seams
from .chains import Chains, DepthChooser, GuessRates, best_chains
from .requests import LONGEST_MATCH, Requests, RequestState
from .row_tables import LONGEST, NO_TOKEN, RowTables
from .seams import LogitsHook, TopRows, align

logger = logging.getLogger(__name__)
# Of the options, in vLLM's `additional_config`.
SECTION = "token_recycling"
RANGES = {"top_k": (1, 64), "table_bits": (8, 24), "history_tokens": (0, 2**28)}
DEPTHS = ("auto", "full")


@dataclass(frozen=True, slots=True)
class PluginOptions:
    """Options of the drafter; raises ValueError if a value is not allowed."""

    top_k: int = 8  # successors kept in a row
    table_bits: int = 18  # log2 of the rows kept for the last two and three tokens
    # Whether requests draft from each other's rows and texts. If not, what one request says can never appear
    # in another's drafts.
    share: bool = True
    history_tokens: int = 2**20  # of ended requests that are kept for suffix matches; 0: none
    # auto drafts as many tokens as pay at the current batch size, possibly none; full always drafts
    # `num_speculative_tokens`.
    depth: str = "auto"
    load_matrix: str | None = None  # file of a saved adjacency matrix to begin with
    save_matrix: str | None = None  # file that it is saved to when the engine ends
    # Whether the token of every learned row is compared with what the model was fed (eager execution only).
    debug: bool = False

    def __post_init__(self) -> None:
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            is_number = isinstance(value, int) and not isinstance(value, bool)
            self._check(name, is_number and least <= value <= most, f"{least} to {most}")
        for name in ("share", "debug"):
            self._check(name, isinstance(getattr(self, name), bool), "true or false")
        self._check("depth", self.depth in DEPTHS, ", ".join(DEPTHS))
        for name in ("load_matrix", "save_matrix"):
            value = getattr(self, name)
            self._check(name, value is None or (value and isinstance(value, str)), "a file's path")
            allowed = "none with share false, which has no common matrix"
            self._check(name, value is None or self.share, allowed)

    def _check(self, name: str, is_allowed: object, allowed: str) -> None:
        if not is_allowed:
            raise ValueError(f"{name}: got {getattr(self, name)!r}; allowed: {allowed}")

    @classmethod
    def read(cls, additional_config: Any) -> PluginOptions:
        """Return the options of vLLM's `additional_config`; raises ValueError if one is unknown or not allowed."""
        is_given = isinstance(additional_config, Mapping)
        section = additional_config.get(SECTION, {}) if is_given else {}
        if not isinstance(section, Mapping):
            raise ValueError(f"{SECTION}: got {section!r}; allowed: a dictionary of options")
        names = [field.name for field in fields(cls)]
        for name in section:
            if name not in names:
                raise ValueError(f"{SECTION}: got {name!r}; allowed: {', '.join(names)}")
        return cls(**section)


@dataclass
class Counters:
    rows: int = 0  # of logits, seen
    learned: int = 0  # rows whose token was known, and which were learned
    # With the option debug: learned rows compared with the token that the model was fed, and those that differ.
    checked: int = 0
    wrong: int = 0


class _Turn(NamedTuple):
    """A request that emitted tokens in the step that ended."""

    place: int  # its row in the batch
    text: np.ndarray  # all its tokens, the emitted ones included
    emitted: list[int]  # the tokens of this step
    request: RequestState  # what was drafted for this step, and what is known of it
    is_new: bool  # whether nothing was drafted for it, because it is seen for the first time


class RecyclingProposer:
    """Drafts chains for vLLM's `method="custom_class"`.

    Raises:
        ValueError: if an option is not allowed.
        RuntimeError: if this vLLM lacks what the drafter is built on.
    """

    def __init__(self, vllm_config: Any) -> None:
        seams.check_vllm()
        self.options = options = PluginOptions.read(vllm_config.additional_config)
        self.counters = Counters()
        self._depth = vllm_config.speculative_config.num_speculative_tokens
        vocab_size = vllm_config.model_config.get_vocab_size()
        self._tables = RowTables(vocab_size, options.top_k, options.table_bits, options.share)
        if options.load_matrix:
            self._tables.load(Path(options.load_matrix))
        if options.save_matrix:
            atexit.register(self._tables.save, Path(options.save_matrix))
        self._requests = Requests(options.share, options.history_tokens)
        self._rates = GuessRates()
        self._chooser = DepthChooser(options.depth == "auto")
        self._logits: LogitsHook | None = None
        self._ended: float | None = None  # when the last step's drafts were handed over

    def load_model(self, target_model: Any) -> None:
        self._logits = LogitsHook(target_model, self.options.top_k, self.options.debug)
        size = self._tables.num_bytes / 2**20
        logger.info("Token Recycling: %.1f MiB of rows, %s", size, self.options)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        *further: Any,
        **named: Any,
    ) -> list[list[int]]:
        """Return the tokens drafted after each request of the batch, [] for none.

        Args:
            sampled_token_ids: tokens that each request emitted in this step; [] in the middle of a prompt.
            num_tokens_no_spec: length of each request's text, these included.
            token_ids_cpu: the texts, one a row.
            further: not used; vLLM may pass more in later versions.
            named: not used.

        Raises:
            RuntimeError: if the arguments are not those that this drafter knows.
        """
        started = time.perf_counter()
        seams.check_arguments(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        num_emitted = [len(emitted) for emitted in sampled_token_ids]
        turns = [
            self._turn(place, token_ids_cpu[place, : int(num_tokens_no_spec[place])], list(emitted))
            for place, emitted in enumerate(sampled_token_ids)
            if len(emitted)
        ]
        top = self._logits.take() if self._logits else None
        if top is not None:
            is_pure = len(turns) == len(num_emitted) and not any(turn.is_new for turn in turns)
            if is_pure and self._ended is not None:  # the engine did nothing but decode
                milliseconds = 1000 * (started - self._ended)
                self._chooser.cost.learn(len(turns), len(top.shares), milliseconds)
            self._learn_rows(turns, num_emitted, top)
        for turn in turns:
            self._learn_rates(turn)
            self._requests.keep(turn.request, turn.text, len(turn.emitted))
        drafts: list[list[int]] = [[] for _ in num_emitted]
        if turns:
            self._draft(turns, drafts)
        self._requests.end_step()
        self._ended = time.perf_counter()
        return drafts

    def _turn(self, place: int, text: np.ndarray, emitted: list[int]) -> _Turn:
        before = text[: len(text) - len(emitted)]
        known = self._requests.take(before)
        request = known or self._requests.begin(before)
        return _Turn(place, text, emitted, request, is_new=known is None)

    def _learn_rows(self, turns: list[_Turn], num_emitted: list[int], top: TopRows) -> None:
        """Write the row of every token that is known to have one, those of the text last."""
        num_drafted = [0] * len(num_emitted)
        for turn in turns:
            num_drafted[turn.place] = turn.request.num_drafted
        rows = align(num_drafted, num_emitted, len(top.shares))
        rejected: list[tuple[list[int], int, int]] = []  # context, number of the text, row
        of_text: list[tuple[list[int], int, int]] = []
        for turn in turns:
            before = turn.text[: len(turn.text) - len(turn.emitted)][-LONGEST:].tolist()
            tokens = [NO_TOKEN] * (LONGEST - len(before)) + before + turn.request.drafted
            for place, row in enumerate(rows[turn.place]):
                if row is not None:
                    kind = of_text if place < len(turn.emitted) else rejected
                    kind.append((tokens[place : place + LONGEST], turn.request.text_number, row))
        self.counters.rows += len(top.shares)
        known = rejected + of_text
        if not known:
            return
        contexts, text_numbers, places = (np.array(column) for column in zip(*known, strict=True))
        self._tables.write(contexts, text_numbers, top.successors[places], top.shares[places])
        self.counters.learned += len(known)
        if top.fed is not None:
            fed = top.fed[places]
            self.counters.checked += int((fed >= 0).sum())
            self.counters.wrong += int(((fed >= 0) & (fed != contexts[:, -1])).sum())

    def _learn_rates(self, turn: _Turn) -> None:
        """Learn whether the guesses were right, up to the first wrong one, drafted or not."""
        guesses = zip(turn.request.tokens, turn.request.kinds, turn.emitted, strict=False)
        for guess, kind, token in guesses:
            self._rates.learn(kind, guess == token)
            if guess != token:
                break

    def _draft(self, turns: list[_Turn], drafts: list[list[int]]) -> None:
        chains = self._chains(turns)
        lengths = self._chooser.lengths(chains.probabilities)
        num_guesses = (chains.probabilities > 0).sum(axis=1)
        for index, turn in enumerate(turns):
            guesses = slice(int(num_guesses[index]))
            turn.request.tokens = chains.tokens[index, guesses].tolist()
            turn.request.kinds = chains.kinds[index, guesses].tolist()
            turn.request.num_drafted = int(lengths[index])
            drafts[turn.place] = turn.request.drafted

    def _chains(self, turns: list[_Turn]) -> Chains:
        matches = np.full((len(turns), 2, self._depth), -1, dtype=np.int64)
        match_lengths = np.zeros((len(turns), 2), dtype=np.int64)
        contexts = np.full((len(turns), LONGEST), NO_TOKEN, dtype=np.int64)
        for place, turn in enumerate(turns):
            tail = turn.text[-LONGEST_MATCH:].tolist()
            end = tail[-LONGEST:]
            contexts[place, LONGEST - len(end) :] = end
            for source, index in enumerate((turn.request.index, self._requests.history)):
                if index and (match := index.longest_match(tail, self._depth)):
                    following, match_lengths[place, source] = match
                    matches[place, source, : len(following)] = following
        text_numbers = np.array([turn.request.text_number for turn in turns], dtype=np.int64)
        floor = self._chooser.floor(len(turns))
        return best_chains(
            self._tables, self._rates, contexts, text_numbers, matches, match_lengths, floor
        )
