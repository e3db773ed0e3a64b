"""Show where the time of a forward pass goes: products, attention, other operations, Python.

Passes over a few rows are timed as they are, then watched by torch's profiler. Its times of operations are sums
of the calling thread over all passes that were watched; what is left of a pass outside all operations is Python,
with dispatch. "Read" is the roofline of the products: the bytes of the weights at the bandwidth of a copy. While
other programs run, the figures mean nothing.

Examples:
    python -m scripts.benchmark.pass_parts --threads 1
    python -m scripts.benchmark.pass_parts --model-path smollm2-135m --dtype bfloat16 --nodes 1 4 8 32
    python -m scripts.benchmark.pass_parts --kernels off
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from evaluation.reporting.tables import markdown_table
from model.budget.measure import draft_of
from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.loading import check_model, load_target
from model.commands.model_options import ModelOptions
from model.commands.options import add_options, config_of
from model.engine.target import TargetModel
from model.kernels.packed import packed_weights
from model.machine.timing import seconds_of
from scripts.benchmark.device_costs import choose_contexts, conditions, copy_bandwidth

NUM_PASSES = 15
# What an operation of torch's or ours counts as, by a part of its name; the first that fits.
KINDS = {
    "products": ("few_rows", "linear", "mm", "matmul"),
    "attention": ("attend", "attention"),
}


class PassParts(NamedTuple):
    """Milliseconds of a forward pass, and of its parts.

    Attributes:
        num_nodes: rows of the pass.
        milliseconds: median of whole passes that nobody watches.
        products, attention, others: of operations.
        python: the rest.
        read: to read the weights once, at the bandwidth of a copy.
    """

    num_nodes: int
    milliseconds: float
    products: float
    attention: float
    others: float
    python: float
    read: float


@torch.inference_mode()
def pass_parts(
    target: TargetModel, nodes: Sequence[int], context: int, num_passes: int = NUM_PASSES
) -> list[PassParts]:
    """Time passes over drafts of these sizes after so many tokens, on a CPU."""
    cache = target.new_cache(context + max(nodes))
    for _ in target.prefill([1] * (context + 1), cache, with_logits=False):
        pass
    tensors = (*target.model.parameters(), *packed_weights(target.model))
    weights = sum(tensor.nbytes for tensor in tensors)
    read = 1e3 * weights / copy_bandwidth(target.device, target.synchronize)
    found = []
    for num_nodes in nodes:
        tree = draft_of(target, num_nodes)

        def run() -> None:
            target.forward(tree, cache)  # noqa: B023
            cache.set_length(context)

        times = [seconds_of(run, target.synchronize) for _ in range(num_passes + 2)][2:]
        total = 1e3 * statistics.median(times)
        with profile(activities=[ProfilerActivity.CPU]) as watched:
            for _ in range(num_passes):
                run()
        parts = dict.fromkeys((*KINDS, "others"), 0.0)
        for event in watched.key_averages():
            parts[_kind(event.key)] += event.self_cpu_time_total / 1e3 / num_passes
        rest = total - sum(parts.values())
        found.append(PassParts(num_nodes, total, **parts, python=max(0.0, rest), read=read))
    return found


def _kind(operation: str) -> str:
    kinds = (kind for kind, parts in KINDS.items() if any(part in operation for part in parts))
    return next(kinds, "others")


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = OptionParser(prog="python -m scripts.benchmark.pass_parts", description=__doc__)
    names = ("model_path", "dtype", "threads", "kernels", "weights", "allow_pickle")
    add_options(parser, ModelOptions, names)
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=[1, 4, 8, 32], help="rows of a pass (%(default)s)"
    )
    parser.add_argument(
        "--context", type=int, default=256, help="cached tokens before them (%(default)s)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    args = build_parser().parse_args(argv)
    for name, least in (("nodes", min(args.nodes)), ("context", args.context)):
        if least < 1:
            raise UserError(f"{name}: got {least}; allowed: 1 or more")
    options = config_of(ModelOptions, vars(args))
    model = check_model(options)
    (context,) = choose_contexts([args.context], model.hf_config.get_text_config(decoder=True))
    target = load_target(options, model)
    parts = pass_parts(target, sorted(set(args.nodes)), context)
    header = ["nodes", "ms", "products", "attention", "others", "Python", "read"]
    cells = [
        [str(one.num_nodes), *(f"{milliseconds:.2f}" for milliseconds in one[1:])] for one in parts
    ]
    report = {
        **conditions(argv, model),
        "kernel_names": target.kernel_names,
        "context": context,
        "parts": [one._asdict() for one in parts],
    }
    print(markdown_table(header, cells))
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    run_command(main)
