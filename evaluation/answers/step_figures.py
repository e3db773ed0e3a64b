"""Figures of an answer file's steps: acceptance by place in the tree, by source and by turn, and times of parts.

A step emits its accepted drafted tokens and one of the model's own; one that the limit or the end of text cuts may
lack the latter. Steps without a draft emit one token: some count them, some do not, so that three averages are
called acceptance length (docs/acceptance.md). Rows without counts, such as other people's, are passed over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import pandas as pd

from evaluation.answers.row import AnswerRow, Choice
from model.serve.acceptance import StepCounts

Key = TypeVar("Key", int, str)
# Depth in the tree (the root's children have 1) and place among the siblings (from 0).
NodePlace = tuple[int, int]
# Of a step, each timed.
PARTS = ("draft", "forward", "verify", "keep", "observe")
# What tells each step of a server's answer.
STEPS_OF_FIELDS = {"per_step_accepted", "acceptance_histogram"}
# Bins are those of speculators' scripts: a prompt's length lies in (4096, 8192], and so on up to 1M; a step's
# place in [256, 512), and so on.
START_EDGES = (0, *(2**power for power in range(12, 21)))
POSITION_BIN = 256


def acceptance_rate(rows: Iterable[AnswerRow]) -> float:
    """Return the share of drafted nodes that were accepted; NaN if nothing is known to be drafted."""
    counts = node_counts(rows)
    num_drafted = counts["drafted"].sum()
    return float(counts["accepted"].sum() / num_drafted) if num_drafted else math.nan


def node_counts(rows: Iterable[AnswerRow]) -> pd.DataFrame:
    """Return how many nodes were drafted and accepted at every place of the tree.

    Columns: `depth` (the root's children have 1), `rank` (place among the siblings, from 0),
    `drafted` (above 0), `accepted`; empty if no row has counts.
    """
    drafted: Counter[NodePlace] = Counter()
    accepted: Counter[NodePlace] = Counter()
    for choice in _choices(rows):
        for counts, turns in ((drafted, choice.drafted), (accepted, choice.accepted)):
            for depth, ranks in chain.from_iterable(enumerate(levels, 1) for levels in turns):
                counts.update({(depth, rank): count for rank, count in enumerate(ranks)})
    found = [(*place, count, accepted[place]) for place, count in sorted(drafted.items()) if count]
    return pd.DataFrame(found, columns=["depth", "rank", "drafted", "accepted"])


def source_counts(rows: Iterable[AnswerRow]) -> pd.DataFrame:
    """Return how many nodes each source `drafted` and had `accepted`, by its name; empty if none is named."""
    found = [
        {"source": name, "drafted": drafted, "accepted": accepted}
        for choice in _choices(rows)
        for sources in choice.sources
        for name, (drafted, accepted) in sources.items()
    ]
    table = pd.DataFrame(found, columns=["source", "drafted", "accepted"])
    return table.groupby("source").sum()


def time_shares(rows: Iterable[AnswerRow]) -> dict[str, float]:
    """Return the share of each part in the time of all steps; empty if no row has times."""
    times = [times for choice in _choices(rows) for times in choice.step_times]
    seconds = pd.DataFrame(times, columns=list(PARTS)).sum()
    total = seconds.sum()
    return {part: float(seconds[part] / total) for part in PARTS} if total > 0 else {}


def _choices(rows: Iterable[AnswerRow]) -> Iterator[Choice]:
    for row in rows:
        yield from row.choices


class TurnSteps(NamedTuple):
    """The steps of one answer."""

    request: tuple[int | str, int]  # question and choice, common to the turns of one conversation
    category: str
    turn: int
    prompt_tokens: int | None  # None if not known
    steps: list[StepCounts]
    is_in_order: bool = True  # whether the steps without a draft stand where they were
    knows_drafts: bool = True  # whether it is known which steps drafted


@dataclass(slots=True)
class AcceptanceSums:
    """Counts over many steps; what answers do not tell is NaN."""

    lengths: Counter[int]  # number of steps by the tokens that they emitted, every step counted
    request_means: list[float]  # tokens a step of each request
    drafts: float = math.nan  # steps that had a draft
    draft_tokens: float = math.nan  # of trees nodes
    accepted: float = math.nan  # drafted tokens

    @property
    def num_steps(self) -> float:
        """Steps, NaN if there are none."""
        return self.lengths.total() or math.nan

    @property
    def per_step(self) -> float:
        """Tokens a step, every step counted."""
        return sum(length * count for length, count in self.lengths.items()) / self.num_steps

    @property
    def per_drafted_step(self) -> float:
        """Tokens a drafted step, as vLLM counts: 1 + accepted / drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else math.nan

    @property
    def per_request(self) -> float:
        """Mean of the requests' means."""
        return sum(self.request_means) / (len(self.request_means) or math.nan)


def turn_steps(rows: Iterable[AnswerRow]) -> list[TurnSteps]:
    """Return the steps of every turn of answer rows; turns without any record of steps are left out."""
    return [
        found
        for row in rows
        if not row.is_failed
        for index, choice in enumerate(row.choices)
        for turn in range(choice.num_turns)
        if (found := _turn(row, index, choice, turn)) is not None
    ]


def acceptance_sums(turns: Sequence[TurnSteps]) -> AcceptanceSums:
    """Return the counts of these turns; a request is a conversation."""
    requests: dict[tuple[int | str, int], list[StepCounts]] = {}
    for turn in turns:
        requests.setdefault(turn.request, []).extend(turn.steps)
    sums = AcceptanceSums(
        lengths=Counter(step.tokens for turn in turns for step in turn.steps),
        request_means=[
            sum(step.tokens for step in steps) / len(steps) for steps in requests.values() if steps
        ],
    )
    if all(turn.knows_drafts for turn in turns):
        drafted = [step for turn in turns for step in turn.steps if step.drafted]
        sums.drafts = len(drafted)
        sums.draft_tokens = sum(step.drafted for step in drafted)
        sums.accepted = sum(step.accepted for step in drafted)
    return sums


def by_category(turns: Sequence[TurnSteps]) -> dict[str, list[TurnSteps]]:
    """Return the turns of each category, in the order in which these occur."""
    return _grouped(turns, lambda turn: turn.category)


def _grouped(
    turns: Iterable[TurnSteps], key: Callable[[TurnSteps], Key]
) -> dict[Key, list[TurnSteps]]:
    found: dict[Key, list[TurnSteps]] = {}
    for turn in turns:
        found.setdefault(key(turn), []).append(turn)
    return found


def by_start_length(
    turns: Sequence[TurnSteps], edges: Sequence[int] = START_EDGES
) -> dict[str, list[TurnSteps]]:
    """Return the turns by the bin of their prompt's length, in order; turns of unknown length are left out."""
    known = [turn for turn in turns if turn.prompt_tokens is not None]

    def upper(turn: TurnSteps) -> int:
        length = turn.prompt_tokens or 0
        return next((place for place, edge in enumerate(edges[1:]) if length <= edge), len(edges))

    found = _grouped(sorted(known, key=upper), upper)
    return {
        f"{edges[place]}-{edges[place + 1]}" if place < len(edges) else f"{edges[-1]}+": part
        for place, part in found.items()
    }


def by_position(
    turns: Sequence[TurnSteps], width: int = POSITION_BIN
) -> dict[str, list[TurnSteps]]:
    """Return the steps by the bin of the tokens before each, as parts of turns, in order.

    Turns whose steps are not known in order are left out.
    """
    parts: dict[int, list[TurnSteps]] = {}
    for turn in turns:
        if not turn.is_in_order or turn.prompt_tokens is None:
            continue
        steps: dict[int, list[StepCounts]] = {}
        place = turn.prompt_tokens
        for step in turn.steps:
            steps.setdefault(place // width, []).append(step)
            place += step.tokens
        for bin_index, part in steps.items():
            parts.setdefault(bin_index, []).append(turn._replace(steps=part))
    return {f"{width * place}-{width * (place + 1)}": parts[place] for place in sorted(parts)}


def by_turn(turns: Sequence[TurnSteps]) -> dict[str, list[TurnSteps]]:
    """Return the turns by their index, from 1."""
    found = _grouped(sorted(turns, key=lambda it: it.turn), lambda it: it.turn)
    return {str(index + 1): part for index, part in found.items()}


def _turn(row: AnswerRow, index: int, choice: Choice, turn: int) -> TurnSteps | None:
    request, prompt_tokens = (row.question_id, index), choice.prompt_length(turn)
    if turn < len(choice.speculative_decoding):
        fields = choice.speculative_decoding[turn]
        num_steps = choice.decoding_steps[turn]
        if not STEPS_OF_FIELDS & fields.keys():
            return None  # sums, which counters of /metrics tell, are no steps
        steps, is_in_order = _steps_of_fields(fields, num_steps)
        return TurnSteps(request, row.category, turn, prompt_tokens, steps, is_in_order)
    if turn >= len(choice.decoding_steps):
        return None
    begin = sum(choice.decoding_steps[:turn])
    lengths = choice.accept_lengths[begin : begin + choice.decoding_steps[turn]]
    if not lengths:
        return None
    knows = turn < len(choice.step_nodes) and len(choice.step_nodes[turn]) == len(lengths)
    nodes = choice.step_nodes[turn] if knows else [0] * len(lengths)
    levels = choice.accepted[turn] if turn < len(choice.accepted) else []
    accepted = [length - 1 for length in lengths]
    if levels:  # a step that was cut may lack the model's own token
        missing = sum(map(sum, levels)) - sum(accepted)
        accepted[-1] = min(lengths[-1], accepted[-1] + missing)
    steps = [
        StepCounts(length, count, one, len(levels) if count else 0)
        for length, count, one in zip(lengths, nodes, accepted, strict=True)
    ]
    return TurnSteps(request, row.category, turn, prompt_tokens, steps, knows_drafts=knows)


def _steps_of_fields(fields: dict[str, Any], num_steps: int) -> tuple[list[StepCounts], bool]:
    """Return the steps that vLLM's fields tell, those without a draft last, and whether none is of these.

    Args:
        fields: `metrics.speculative_decoding`, at its level "detailed" or "summary".
        num_steps: steps, those without a draft included.
    """
    depth = int(fields.get("num_spec_tokens") or 0)
    accepted, drafted = fields.get("per_step_accepted"), fields.get("per_step_drafted")
    if not accepted or not drafted:
        histogram = fields.get("acceptance_histogram") or []
        accepted = [place for place, count in enumerate(histogram) for _ in range(count)]
        # Only their sum is known.
        total, count = int(fields.get("num_draft_tokens") or 0), len(accepted)
        drafted = [total // count + (place < total % count) for place in range(count)]
    steps = [
        StepCounts(one + 1, nodes, one, depth) for one, nodes in zip(accepted, drafted, strict=True)
    ]
    num_plain = max(0, num_steps - len(steps))
    return [*steps, *[StepCounts(1, 0, 0, 0)] * num_plain], num_plain == 0
