"""Measure the cost of a longer text: milliseconds of a forward pass by context, attention apart.

Passes over one node and over a tree are timed after contexts of several lengths, in rounds over all
of them. If anything besides attention grows with the text (copies of the cache, masks), it is a fault
of the engine; it shows here as a growing rest. Prints a table and a line of JSON; draws a picture
with --out.

Example:
    python -m scripts.benchmark.context_cost --contexts 512 4096 16384 --out docs/img/context-cost.png
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from evaluation.reporting.tables import markdown_table
from model.budget.measure import draft_of, has_room
from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.files import check_output, replace_file
from model.commands.loading import check_model, load_target
from model.commands.model_options import DEFAULT_MODEL, ModelOptions
from model.commands.options import add_options, config_of
from model.engine.cache import TreeCache
from model.engine.target import TargetModel
from model.engine.tree import DraftTree
from model.kernels import short_pass
from model.machine.timing import seconds_of
from scripts.benchmark.device_costs import choose_contexts, conditions

NUM_ROUNDS = 7


class ContextCost(NamedTuple):
    """Median milliseconds of a forward pass over `num_nodes` nodes after `context` tokens, and of
    its attention kernels.
    """

    num_nodes: int
    context: int
    milliseconds: float
    attention: float

    @property
    def rest(self) -> float:
        """Milliseconds of all but the attention kernels."""
        return self.milliseconds - self.attention


@torch.inference_mode()
def context_costs(
    target: TargetModel, nodes: Sequence[int], contexts: Sequence[int], num_rounds: int = NUM_ROUNDS
) -> list[ContextCost]:
    """Time passes over trees of these sizes after texts of these lengths."""
    caches = {context: target.new_cache(context + max(nodes)) for context in contexts}
    for context, cache in caches.items():
        for _ in target.prefill([1] * (context + 1), cache, with_logits=False):
            pass
    points = [(num_nodes, context) for num_nodes in nodes for context in contexts]
    times: dict[tuple[int, int], list[tuple[float, float]]] = {point: [] for point in points}
    for _ in range(num_rounds + 1):
        for num_nodes, context in points:
            tree = draft_of(target, num_nodes)
            times[num_nodes, context].append(_time_pass(target, tree, caches[context]))
    costs = []
    for (num_nodes, context), passes in times.items():
        # The first round pays for initialisation.
        total, attention = (
            1e3 * statistics.median(seconds) for seconds in zip(*passes[1:], strict=True)
        )
        costs.append(ContextCost(num_nodes, context, total, attention))
    return costs


def _time_pass(target: TargetModel, tree: DraftTree, cache: TreeCache) -> tuple[float, float]:
    """Return the seconds of a pass, and of its attention kernels."""
    base = cache.length
    with _timed_attention(target) as attention:
        total = seconds_of(lambda: target.forward(tree, cache), target.synchronize)
    cache.set_length(base)
    return total, sum(attention)


@contextmanager
def _timed_attention(target: TargetModel) -> Iterator[list[float]]:
    """Add the seconds of every call of an attention kernel, PyTorch's or ours, within the block to a
    list.
    """
    seconds: list[float] = []

    def timed(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            target.synchronize()
            start = time.perf_counter()
            attended = kernel(*args, **kwargs)
            target.synchronize()
            seconds.append(time.perf_counter() - start)
            return attended

        return run

    theirs, ours = functional.scaled_dot_product_attention, short_pass.attend
    functional.scaled_dot_product_attention, short_pass.attend = timed(theirs), timed(ours)
    try:
        with target.programs.in_two_calls():
            yield seconds
    finally:
        functional.scaled_dot_product_attention, short_pass.attend = theirs, ours


def draw(costs: Sequence[ContextCost], path: Path) -> None:
    """Draw time against context: all of a pass, and all but attention."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for index, num_nodes in enumerate(sorted({cost.num_nodes for cost in costs})):
        rows = [cost for cost in costs if cost.num_nodes == num_nodes]
        contexts = [row.context for row in rows]
        name = "one node" if num_nodes == 1 else f"{num_nodes} nodes"
        style: dict[str, Any] = {"color": f"C{index}", "marker": "o", "markersize": 4}
        axes.plot(contexts, [row.milliseconds for row in rows], label=name, **style)
        axes.plot(
            contexts,
            [row.rest for row in rows],
            label=f"{name}, without attention",
            linestyle="--",
            **style,
        )
    axes.set(xlabel="context (tokens)", ylabel="milliseconds of a forward pass")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    kind = path.suffix.removeprefix(".")
    replace_file(path, lambda file: figure.savefig(file, dpi=150, format=kind))


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = OptionParser(prog="python -m scripts.benchmark.context_cost", description=__doc__)
    parser.add_argument("--model-path", default=DEFAULT_MODEL, help="folder or hub name")
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[512, 1024, 2048, 4096, 8192],
        help="cached tokens before the tree (%(default)s)",
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 81], help="sizes of trees")
    add_options(parser, ModelOptions, ("dtype", "device", "threads", "allow_pickle"))
    parser.add_argument("--out", type=Path, metavar="FILE", help="picture, PNG or SVG")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    args = build_parser().parse_args(argv)
    for name in ("contexts", "nodes"):
        if min(getattr(args, name)) < 1:
            raise UserError(f"{name}: got {min(getattr(args, name))}; allowed: 1 or more")
    if args.out:
        check_output(args.out, "out")
        if args.out.suffix not in (".png", ".svg"):
            raise UserError(f"out: got {args.out}; allowed: a .png or .svg file")
    options = config_of(ModelOptions, vars(args))
    model = check_model(options)
    contexts = choose_contexts(args.contexts, model.hf_config.get_text_config(decoder=True))
    target = load_target(options, model)
    nodes, context = max(args.nodes), max(contexts)
    if not has_room(target, nodes, context):
        raise UserError(
            f"contexts: got {context} with {nodes} nodes, which are a chain with this model and exceed its "
            "context; give shorter ones, or fewer nodes"
        )
    costs = context_costs(target, sorted(set(args.nodes)), sorted(set(contexts)))
    header = ["nodes", "context", "ms", "attention ms", "rest ms"]
    cells = [
        [str(cost.num_nodes), str(cost.context)]
        + [f"{value:.2f}" for value in (cost.milliseconds, cost.attention, cost.rest)]
        for cost in costs
    ]
    if args.out:  # before anything is printed: a reader such as `head` may leave
        draw(costs, args.out)
    print(markdown_table(header, cells))
    report = {
        **conditions(argv, model),
        "costs": [cost._asdict() for cost in costs],
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    run_command(main)
