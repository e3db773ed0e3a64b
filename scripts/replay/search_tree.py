r"""Learn a static tree template for Token Recycling from recorded answers.

At every step of a recorded run the tokens that follow are known, and with the adjacency matrix of
that moment the ranks that would have been right, however large the tree: one path of ranks. Their counts
give every path a probability, and the N most probable paths make the template that accepts most.
What the matrix holds depends on the tree that filled it, so that the run is repeated with what was
learned.

The template is a JSON file for `--tree-version`.

Examples:
    python -m scripts.replay record --out demo.replay --num-questions 15
    python -m scripts.replay.search_tree demo.replay --extend --nodes 32 --out tree32.json
    python -m evaluation.inference_recycling --tree-version tree32.json
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from model.commands.command_line import OptionParser, UserError, add_options, run_command
from model.commands.files import check_output, refuse_outputs, write_whole
from model.commands.model_options import ModelOptions
from model.engine.budget import MAX_DRAFT, DraftBudget
from model.engine.tree import DraftTree
from model.methods.recycling.drafter import RecyclingConfig, RecyclingDrafter, load_template
from scripts.replay.recording import RecordedTurn, Recording
from scripts.replay.scores import TurnScore, check_replayable, figures, score
from scripts.replay.target import ReplayTarget, load_recorded_model

FIRST_TEMPLATE = "2.2.2"
# Observations that the shares over all paths are worth against those of one path.
SMOOTHING = 20.0

RankPath = tuple[int, ...]


class TracingDrafter(RecyclingDrafter):
    """Token Recycling that counts, at every step, the path of ranks that is right by the known answers."""

    def __init__(
        self,
        config: RecyclingConfig,
        vocab_size: int,
        turns: Sequence[RecordedTurn],
        max_depth: int,
    ) -> None:
        super().__init__(config, vocab_size, torch.device("cpu"))
        self.counts: Counter[RankPath] = Counter()
        self.num_steps = 0
        self._answers = {turn.prompt_ids: turn.answer_ids for turn in turns}
        self._answer: Sequence[int] = ()
        self._prompt_length = 0
        self._max_depth = max_depth

    def start(self, prompt_ids: Sequence[int]) -> None:
        super().start(prompt_ids)
        self._answer = self._answers[tuple(prompt_ids)]
        self._prompt_length = len(prompt_ids)

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Count the right path, and draft as ever."""
        matrix = self._matrix
        begin = len(context) - self._prompt_length
        token = context[-1]
        path: RankPath = ()
        for following in self._answer[begin : begin + self._max_depth]:
            ranks = np.flatnonzero(matrix[token] == following)
            if not len(ranks):
                break
            token, path = following, (*path, int(ranks[0]))
            self.counts[path] += 1
        self.num_steps += 1
        return super().propose(context, budget)


def learn(
    target: ReplayTarget,
    turns: Sequence[RecordedTurn],
    num_nodes: int = 80,
    num_ranks: int = 8,
    max_depth: int = 12,
    num_rounds: int = 2,
) -> list[RankPath]:
    """Learn the rank paths that are right most often.

    Args:
        target: the recording.
        turns: the answers.
        num_nodes: paths wanted.
        num_ranks: successors kept for a token (k); ranks are 0 to k - 1.
        max_depth: longest path.
        num_rounds: runs; the first one with the paper's template.

    Returns:
        The paths, the most probable first: the first n are the best template of n nodes.
    """
    paths = first_paths(num_ranks)
    for _ in range(num_rounds):
        drafter, _ = traced(target, turns, paths, num_ranks, max_depth)
        counts = drafter.counts + Counter({(): drafter.num_steps})
        paths = most_probable(counts, num_nodes, num_ranks, max_depth)
    return paths


def traced(
    target: ReplayTarget,
    turns: Sequence[RecordedTurn],
    paths: Sequence[RankPath],
    num_ranks: int,
    max_depth: int = 12,
) -> tuple[TracingDrafter, list[TurnScore]]:
    """Run a template over turns; return its drafter, which has counted the right paths, and the scores."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "tree.json"
        write_template(file, paths, "traced")
        config = RecyclingConfig(output_id_topk=num_ranks, tree_version=str(file))
        drafter = TracingDrafter(config, target.vocab_size, turns, max_depth)
    check_replayable(drafter, "recycling", target.recording.source.top_k)
    return drafter, score(target, drafter, turns)


def first_paths(num_ranks: int) -> list[RankPath]:
    """Return the paths of the paper's template that go by the first successors alone."""
    return [path for path in load_template(FIRST_TEMPLATE).paths if max(path) < num_ranks]


def most_probable(
    counts: Counter[RankPath], num_nodes: int, num_ranks: int, max_depth: int
) -> list[RankPath]:
    """Return the paths with the largest probability of being right, in falling order.

    The share of a rank among the successors of a path is smoothed towards its share among those of
    all paths: the tail of a template was seen too seldom to be counted.

    Args:
        counts: how often each path was right; of the empty path, how often there was one to find.
        num_nodes: paths wanted.
        num_ranks: ranks are 0 to `num_ranks` - 1.
        max_depth: longest path.
    """
    num_reached = sum(counts.values())
    shares = [
        sum(count for path, count in counts.items() if path and path[-1] == rank) / num_reached
        for rank in range(num_ranks)
    ]
    chosen: list[RankPath] = []
    heap: list[tuple[float, RankPath]] = []

    def push_successors(path: RankPath, probability: float) -> None:
        for rank, share in enumerate(shares):
            right = counts[(*path, rank)] + SMOOTHING * share
            heapq.heappush(heap, (-probability * right / (counts[path] + SMOOTHING), (*path, rank)))

    push_successors((), 1.0)
    while heap and len(chosen) < num_nodes:
        negative, path = heapq.heappop(heap)
        chosen.append(path)
        if len(path) < max_depth:
            push_successors(path, -negative)
    return chosen


def write_template(file: Path, paths: Sequence[RankPath], source: str) -> None:
    """Write a template for `--tree-version`; UserError if that cannot be."""
    write_whole(file, json.dumps({"source": source, "paths": paths}) + "\n")


def build_parser() -> argparse.ArgumentParser:
    parser = OptionParser(prog="python -m scripts.replay.search_tree", description=__doc__)
    parser.add_argument("recording", help="file of scripts.replay record")
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--nodes", type=int, default=80, help="drafted nodes N (%(default)s)")
    parser.add_argument("--ranks", type=int, default=8, help="successors k (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="learning runs (%(default)s)")
    parser.add_argument("--extend", action="store_true", help="ask the model for what is missing")
    add_options(parser, ModelOptions, ("threads",))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    limits = {"nodes": MAX_DRAFT, "ranks": None, "rounds": None}
    for name, most in limits.items():
        value = getattr(args, name)
        if value < 1 or (most and value > most):
            raise UserError(
                f"{name}: got {value}; allowed: 1 {f'to {most}' if most else 'or more'}"
            )
    check_output(args.out, "out")
    refuse_outputs([args.out], [args.recording])
    recording = Recording.load(Path(args.recording))
    source = recording.source
    if args.ranks > source.top_k:
        raise UserError(
            f"ranks: got {args.ranks}; allowed: 1 to {source.top_k}, the tokens of a row in the recording; record "
            "with a larger --top-k"
        )
    threads = getattr(args, "threads", None)
    target = ReplayTarget(recording, load_recorded_model(source, threads) if args.extend else None)
    paths = learn(target, recording.turns, args.nodes, args.ranks, num_rounds=args.rounds)
    write_template(Path(args.out), paths, f"learned from {source.title}, k {args.ranks}")
    first = first_paths(args.ranks)
    found, base = (
        figures(traced(target, recording.turns, tree, args.ranks)[1]) for tree in (paths, first)
    )
    if args.extend:
        recording.save(Path(args.recording))
    print(
        f"{len(paths)} nodes, depth {max(map(len, paths))}, in {args.out}; MAT {found.mat:.2f}, before "
        f"loops {found.mat_before_loops:.2f}, on the answers that it was learned from; the paper's "
        f"{len(first)} nodes: {base.mat:.2f}, {base.mat_before_loops:.2f}"
    )
    return 0


if __name__ == "__main__":
    run_command(main)
