"""The cost of a longer text: milliseconds of a forward pass by context, attention apart.

Passes are timed after contexts of several lengths, in rounds over all of them. Whatever grows with the
text beside attention (copies of the cache, masks) is a fault of the engine, and shows here as a rest
that rises.

Example:
    python -m tests.commands.context_cost --model-path smollm2-135m --contexts 512 4096 --nodes 1 81
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from evaluation.reporting.tables import markdown_table
from model.budget.measure import draft_of, has_room
from model.commands.command_line import OptionParser, run_command
from model.commands.loading import check_model, load_target
from model.commands.model_options import ModelOptions
from model.commands.options import add_options, config_of
from model.engine.cache import TreeCache
from model.engine.target import TargetModel
from model.engine.tree import DraftTree
from model.kernels import short_pass
from model.machine.timing import seconds_of
from scripts.benchmark.command import NODES
from scripts.benchmark.device_costs import choose_contexts

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
    """Time passes over trees of these sizes after texts of these lengths, where there is room."""
    caches = {context: target.new_cache(context + max(nodes)) for context in contexts}
    for context, cache in caches.items():
        for _ in target.prefill([1] * (context + 1), cache, with_logits=False):
            pass
    points = [
        (num_nodes, context)
        for num_nodes in nodes
        for context in contexts
        if has_room(target, num_nodes, context)
    ]
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
    """Add the seconds of every call of an attention kernel, PyTorch's or ours, to a list."""
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
        yield seconds
    finally:
        functional.scaled_dot_product_attention, short_pass.attend = theirs, ours


def attention_table(costs: Sequence[ContextCost]) -> str:
    """Return the table of passes with their attention apart."""
    header = ["nodes", "context", "ms", "attention ms", "rest ms"]
    rows = [
        [str(cost.num_nodes), str(cost.context)]
        + [f"{value:.2f}" for value in (cost.milliseconds, cost.attention, cost.rest)]
        for cost in costs
    ]
    return markdown_table(header, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Time passes of a model, and print them as a table and as JSON."""
    parser = OptionParser(prog="python -m tests.commands.context_cost", description=__doc__)
    add_options(parser, ModelOptions, ("model_path", "dtype", "device", "threads"))
    parser.add_argument("--contexts", type=int, nargs="+", help="cached tokens")
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES, help="sizes of trees")
    args = parser.parse_args(argv)
    options = config_of(ModelOptions, vars(args))
    model = check_model(options)
    contexts = choose_contexts(args.contexts, model.hf_config.get_text_config(decoder=True))
    costs = context_costs(load_target(options, model), args.nodes, contexts)
    print(attention_table(costs))
    print(json.dumps([cost._asdict() for cost in costs]))
    return 0


if __name__ == "__main__":
    run_command(main)
