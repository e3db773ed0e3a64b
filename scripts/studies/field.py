"""The field: all train-free methods at equal drafted nodes, and each at its paper's defaults.

A method has one line in `ENTRANTS`. A template of Token Recycling's best nodes is ranked on every other
question and scored on the rest, once each way, so that every question is scored and none by a tree that
was ranked on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evaluation.answering.entrants import entrant_of
from evaluation.answers.progress import progress
from model.methods.registry import METHODS
from scripts.replay.scores import figures
from scripts.studies.field_tables import (
    DEFAULTS,
    Entrant,
    Run,
    Runs,
    by_task,
    defaults,
    leads,
    memories,
    ratios,
)
from scripts.studies.lab import Lab, Point, Study

NODES = (8, 16, 32, 64)
# Methods that are not of the field: they draft nothing, or with a model that was trained.
OUTSIDE = ("vanilla", "sps")
# Lookahead's N, W and G of at most so many nodes, (N - 1)(N - 2 + W + G): of 15 settings those that accepted most
# on 16 questions (13 of Spec-Bench, 3 of MBPP, 96 tokens), 1.33, 1.39, 1.53 and 1.60 tokens a step.
LOOKAHEAD = {8: (2, 4, 4), 16: (2, 8, 8), 32: (3, 8, 7), 64: (3, 16, 15)}

ENTRANTS = (
    Entrant("hybrid", "hybrid --budget fixed --num-nodes {n}", "hybrid --budget fixed"),
    Entrant("recycling, averages", "recycling {tree}", "recycling"),
    Entrant(
        "recycling, as published",
        "recycling --policy original {tree}",
        "recycling --policy original",
    ),
    Entrant("pld", "pld --num-pred-tokens {n}", "pld"),
    Entrant("lookahead", "lookahead {lookahead}", "lookahead"),
    Entrant(
        "samd alone",
        "samd --fallback none --num-pred-tokens {n}",
        "samd --fallback none --match first",
    ),
    Entrant("samd and recycling", "samd --num-pred-tokens {n} {tree}", "samd --match first"),
    Entrant("goose", "goose --num-nodes {n} --max-extended-chain {n}", "goose"),
    Entrant(
        "goose, hot",
        "goose --start hot --num-nodes {n} --max-extended-chain {n}",
        "goose --start hot",
    ),
)


def check_entrants() -> None:
    """Refuse a line that cannot be run, before anything is loaded.

    Raises:
        UserError: if its method is unknown or refuses its options.
    """
    for entrant in ENTRANTS:
        entrant_of(entrant.defaults)
        for nodes in NODES:
            entrant_of(_options(entrant, nodes, tree=""))


def left_out() -> str:
    """Return what a page says of methods without a line; empty if there are none."""
    known = {*OUTSIDE, *(entrant.method for entrant in ENTRANTS)}
    names = [name for name in METHODS if name not in known]
    return f" Not compared, for want of a line: {', '.join(names)}." if names else ""


def field(lab: Lab) -> Study:
    """Compare all train-free methods at equal nodes, and at their papers' defaults."""
    ranked = {learned: lab.ranked(learned) for learned in (0, 1)}
    columns: dict[str, Runs] = {}
    for nodes in (*NODES, None):
        runs = {}
        for entrant in progress(ENTRANTS, unit="drafter", desc=f"{nodes or DEFAULTS}"):
            runs[entrant.title] = _run(lab, entrant, nodes, ranked)
        columns[str(nodes or DEFAULTS)] = runs
        lab.save()
    points = [
        Point(entrant.title, nodes, figures(columns[str(nodes)][entrant.title].scores))
        for entrant in ENTRANTS
        for nodes in NODES
    ]
    tables = [ratios(columns), leads(columns), defaults(columns[DEFAULTS]), memories(columns)]
    tables += [by_task(name, runs) for name, runs in columns.items()]
    return Study(
        "How do train-free methods compare at equal nodes?",
        "drafted nodes",
        points,
        NOTE + left_out(),
        tables=tables,
    )


NOTE = (
    "With 8 to 64 nodes no step drafts more than the table says, and some draft fewer; at the papers' defaults "
    "sizes differ. Lookahead has the window that fits: "
    + ", ".join(f"{n}: N {N}, W {W}, G {G}" for n, (N, W, G) in LOOKAHEAD.items())
    + ". Recycling's trees are the best nodes of the paper's tree, ranked on every other question and scored on "
    "the rest, both ways round; `original` writes rows as the published code. Rows and automata live "
    "from question to question where they do in the papers; goose, whose rows do not, is run both ways. Intervals "
    "are paired bootstrap intervals (95%) over questions; the best other method is read off the same questions."
)


def _options(entrant: Entrant, nodes: int, tree: str) -> str:
    """Return an entrant's options at a number of drafted nodes."""
    level, window, guess = LOOKAHEAD.get(nodes, (0, 0, 0))
    lookahead = f"--level {level} --window {window} --guess {guess}"
    return entrant.at.format(n=nodes, tree=tree, lookahead=lookahead)


def _run(
    lab: Lab,
    entrant: Entrant,
    nodes: int | None,
    ranked: Mapping[int, Sequence[tuple[int, ...]]],
) -> Run:
    """Run an entrant over all turns; each is scored with a tree that was not ranked on it."""
    if nodes is None:
        return Run(entrant, entrant.defaults, *lab.run_and_weigh(entrant.defaults))
    if "{tree}" not in entrant.at:
        words = _options(entrant, nodes, "")
        scores, num_bytes = lab.run_and_weigh(words)
    else:
        scores = []
        for learned, paths in ranked.items():
            words = _options(entrant, nodes, lab.template(f"field{nodes}-{learned}", paths[:nodes]))
            found, num_bytes = lab.run_and_weigh(words)
            held_out = lab.questions_of_half(1 - learned)
            scores += [score for score in found if score.turn.question_id in held_out]
        places = {turn: place for place, turn in enumerate(lab.recording.turns)}
        scores.sort(key=lambda score: places[score.turn])
    most = max(count - 1 for score in scores for count in score.num_nodes)
    if most > nodes:
        raise RuntimeError(
            f"field: {words!r} drafted {most} nodes; allowed: {nodes}; correct ENTRANTS"
        )
    return Run(entrant, words, scores, num_bytes)
