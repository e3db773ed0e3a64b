"""The field: all methods at equal drafted nodes, and each at its paper's defaults.

A method has one line in `ENTRANTS`. A template of Token Recycling's best nodes is ranked on every other
question and scored on the rest, once each way, so that every question is scored and none by a tree that
was ranked on it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from evaluation.inference.entrants import entrant_of
from model.commands.command_line import UserError, user_errors
from model.machine.progress import progress
from model.methods.registry import METHODS
from model.options import unknown_name
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
    Entrant("hybrid", "hybrid --budget fixed", "--num-nodes {n}", is_published=False),
    Entrant("recycling, averages", "recycling", "{tree}", is_published=False),
    Entrant("recycling, as published", "recycling --policy original", "{tree}"),
    Entrant("pld", "pld", "--num-pred-tokens {n}"),
    Entrant("lookahead", "lookahead", "{lookahead}"),
    Entrant("samd alone", "samd --fallback none", "--num-pred-tokens {n}", "--match first"),
    Entrant("samd and averages", "samd", "--num-pred-tokens {n} {tree}", "--match first", False),
    Entrant(
        "samd and recycling, as published",
        "samd --match first --policy original",
        "--num-pred-tokens {n} {tree}",
    ),
    Entrant(
        "samd and a corpus",
        "samd --fallback none --automaton {automaton}",
        "--num-pred-tokens {n}",
        "--match first",
    ),
    Entrant("suffix", "suffix", "--num-nodes {n}"),
    Entrant("suffix, trees", "suffix --shape tree", "--num-nodes {n}"),
    Entrant("rest", "rest --datastore {datastore}", "--num-nodes {n}"),
    Entrant("logitspec", "logitspec", "--num-nodes {n}"),
    Entrant("racer", "racer", "--num-nodes {n}"),
    Entrant("goose", "goose", "--num-nodes {n} --max-extended-chain {n}"),
    Entrant("goose, hot", "goose --start hot", "--num-nodes {n} --max-extended-chain {n}"),
    Entrant("cacheback", "cacheback", "--num-nodes {n}"),
    Entrant("esp", "esp", "--num-nodes {n}"),
    Entrant("medusa", "medusa --heads {medusa}", "--num-nodes {n}"),
    Entrant("hydra", "hydra --heads {hydra}", "--num-nodes {n}"),
    Entrant("eagle", "eagle --heads {eagle}", "--num-nodes {n}"),
    Entrant("eagle2", "eagle2 --heads {eagle}", "--num-nodes {n}"),
    Entrant("eagle3", "eagle3 --heads {eagle3}", "--num-nodes {n}"),
    Entrant(
        "hybrid and eagle3",
        "hybrid --budget fixed --head eagle3={eagle3}",
        "--num-nodes {n}",
        is_published=False,
    ),
)


def check_entrants(files: Mapping[str, str]) -> None:
    """Refuse a line that cannot be run, before anything is loaded.

    Raises:
        UserError: if its method is unknown or refuses its options, or a file is not there or has no use.
    """
    known = sorted({name for entrant in ENTRANTS for name in entrant.needs})
    for name, file in files.items():
        if name not in known:
            raise UserError(unknown_name("files", name, known))
        if not Path(file).exists():
            raise UserError(f"files: got {name}={file}; there is no such file or folder")
    for entrant in compared(files):
        for nodes in (*NODES, None):
            with user_errors():
                entrant_of(_options(entrant, nodes, files))


def compared(files: Mapping[str, str]) -> list[Entrant]:
    """Return the lines whose files are given."""
    return [entrant for entrant in ENTRANTS if set(entrant.needs) <= set(files)]


def left_out(files: Mapping[str, str]) -> str:
    """Name the lines without their files and the methods without a line, for a page; empty if none."""
    known = {*OUTSIDE, *(entrant.method for entrant in ENTRANTS)}
    names = [f"{name} (it has no line)" for name in METHODS if name not in known]
    names += [
        f"{entrant.title} (give --files {' '.join(f'{name}=FILE' for name in entrant.needs)})"
        for entrant in ENTRANTS
        if not set(entrant.needs) <= set(files)
    ]
    return f" Not compared: {', '.join(names)}." if names else ""


def field(lab: Lab) -> Study:
    """Compare all methods at equal nodes, and at their papers' defaults.

    Those that read what is not recorded, hidden states or logits after masks, answer on the model itself.
    """
    entrants = compared(lab.files)
    for entrant in entrants:
        for size in (*NODES, None):
            lab.check(_options(entrant, size, lab.files))
    ranked = {learned: lab.ranked(learned) for learned in (0, 1)}
    columns: dict[str, Runs] = {}
    for nodes in (*NODES, None):
        runs = {}
        for entrant in progress(entrants, unit="drafter", desc=f"{nodes or DEFAULTS}"):
            runs[entrant.title] = _run(lab, entrant, nodes, ranked)
        columns[str(nodes or DEFAULTS)] = runs
        lab.save()
    points = [
        Point(entrant.title, nodes, figures(columns[str(nodes)][entrant.title].scores))
        for entrant in entrants
        for nodes in NODES
    ]
    tables = [ratios(columns), leads(columns), defaults(columns[DEFAULTS]), memories(columns)]
    tables += [by_task(name, runs) for name, runs in columns.items()]
    return Study(
        "How do methods compare at equal nodes?",
        "drafted nodes",
        points,
        NOTE + left_out(lab.files),
        tables=tables,
    )


NOTE = (
    "With 8 to 64 nodes no step drafts more than the table says, and some draft fewer; at the papers' defaults "
    "sizes differ. Lookahead has the window that fits: "
    + ", ".join(f"{n}: N {N}, W {W}, G {G}" for n, (N, W, G) in LOOKAHEAD.items())
    + ". Recycling's trees are the best nodes of the paper's tree, ranked on every other question and scored on "
    "the rest, both ways round; `original` writes rows as the published code. Rows and automata live "
    "from question to question where they do in the papers; goose, whose rows do not, is run both ways. Hybrid and "
    "the averaged rows are this project's; the other lines are as published, but for the lines of samd without "
    "recycling, which continue the latest match where their size is given: it accepts more. Intervals are paired "
    "bootstrap-t intervals (95%) over questions; the best other method is read off the same questions."
)


def _options(entrant: Entrant, nodes: int | None, files: Mapping[str, str], tree: str = "") -> str:
    """Return an entrant's options at a number of drafted nodes; None: at its defaults."""
    quoted = {name: shlex.quote(file) for name, file in files.items()}
    if nodes is None:
        return entrant.defaults.format(**quoted)
    level, window, guess = LOOKAHEAD.get(nodes, (0, 0, 0))
    lookahead = f"--level {level} --window {window} --guess {guess}"
    fitting = min(nodes, entrant.most_nodes)
    return entrant.at.format(n=fitting, tree=tree, lookahead=lookahead, **quoted)


def _run(
    lab: Lab,
    entrant: Entrant,
    nodes: int | None,
    ranked: Mapping[int, Sequence[tuple[int, ...]]],
) -> Run:
    """Run an entrant over all turns, each with a tree that was not ranked on it."""
    plain = _options(entrant, nodes, lab.files)
    if not lab.replays(plain):
        scores, num_bytes = lab.answer_and_weigh(plain)
    else:
        trees = [""]
        if nodes is not None and "{tree}" in entrant.size:
            trees = [
                lab.template(f"field{nodes}-{half}", ranked[1 - half][:nodes]) for half in (0, 1)
            ]
        words = [_options(entrant, nodes, lab.files, tree) for tree in trees]
        scores, num_bytes = lab.run_and_weigh(words)
    most = max(count - 1 for score in scores for count in score.num_nodes)
    if nodes is not None and most > nodes:
        raise RuntimeError(
            f"field: {entrant.at!r} drafted {most} nodes; allowed: {nodes}; correct ENTRANTS"
        )
    return Run(entrant, scores, num_bytes)
