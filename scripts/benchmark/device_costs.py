"""Costs on this device: milliseconds of a step by nodes and context, memory bandwidth, the roofline.

Speculative decoding pays when the tokens that a step accepts outweigh what its nodes cost, and that
cost is the device's: measured here, on the loaded model, through the same forward pass that
decoding uses.

Shapes: N nodes, T cached tokens.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from evaluation.answers.provenance import git_commit
from evaluation.reporting.tables import markdown_table
from model.budget.measure import draft_of, has_room
from model.commands.command_line import UserError
from model.commands.loading import CheckedModel
from model.engine.support import context_limit
from model.engine.target import TargetModel
from model.kernels.packed import packed_weights, stored
from model.kernels.sdpa import sdpa_backends
from model.machine.hardware import device_name
from model.machine.packages import versions
from model.machine.timing import seconds_of

# Of the cost curve, in cached tokens.
CONTEXTS = (128, 512, 1536)
NUM_TIMED = 7
COPY_BYTES = 2**28


class CostPoint(NamedTuple):
    """The median time of one forward pass over a tree."""

    num_nodes: int
    context: int
    milliseconds: float


class Roofline(NamedTuple):
    """The bound that memory bandwidth sets for one token of plain decoding."""

    bandwidth: float  # bytes read and written per second by a large copy on this device
    bytes_per_token: int  # weights and cache that one token reads
    milliseconds: float  # the least time of one token, `bytes_per_token / bandwidth`
    reached: float  # the share of the roofline that a measured one-node pass reaches, 0 to 1


def conditions(argv: Sequence[str] | None, model: CheckedModel) -> dict[str, Any]:
    """Return the facts that a report of measurements begins with; `argv` as given to a `main`."""
    return {
        "argv": list(argv) if argv is not None else sys.argv[1:],
        "device": device_name(model.device),
        "sdpa_backends": sdpa_backends(model.device),
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "git_commit": git_commit(),
        "versions": versions(),
    }


def choose_contexts(given: Sequence[int] | None, text_config: Any) -> list[int]:
    """Return the contexts of the cost curve: those given, or the usual ones as far as the model's reaches.

    Raises:
        UserError: one given is longer.
    """
    limit = context_limit(text_config, max(given or CONTEXTS) + 2)
    # A root, and nodes that hang from it.
    most = None if limit is None else limit - 2
    if most is None:
        return list(given or CONTEXTS)
    if given and max(given) > most:
        raise UserError(f"contexts: got {max(given)}; allowed: 1 to {most} with this model")
    return list(given or sorted({min(context, most) for context in CONTEXTS}))


@torch.inference_mode()
def cost_curve(
    target: TargetModel, nodes: Sequence[int], contexts: Sequence[int]
) -> list[CostPoint]:
    """Time forward passes over drafts of these sizes after contexts of these lengths, where there is room."""
    points = []
    for context in contexts:
        cache = target.new_cache(context + max(nodes))
        for _ in target.prefill([1] * (context + 1), cache, with_logits=False):
            pass
        for num_nodes in nodes:
            if not has_room(target, num_nodes, context):
                continue
            tree = draft_of(target, num_nodes)
            times = []
            for _ in range(NUM_TIMED + 2):
                times.append(seconds_of(partial(target.forward, tree, cache), target.synchronize))
                cache.set_length(context)
            points.append(CostPoint(num_nodes, context, 1e3 * statistics.median(times[2:])))
    return points


def print_costs(curve: Sequence[CostPoint], roof: Roofline) -> None:
    """Print the milliseconds of a pass by nodes and context, and the roofline."""
    contexts = sorted({point.context for point in curve})
    nodes = sorted({point.num_nodes for point in curve})
    cost = {(point.num_nodes, point.context): point.milliseconds for point in curve}
    body = [
        [
            str(num_nodes),
            *(
                f"{cost[num_nodes, context]:.2f} "
                f"({cost[num_nodes, context] / cost[nodes[0], context]:.2f})"
                if (num_nodes, context) in cost
                else "-"
                for context in contexts
            ),
        ]
        for num_nodes in nodes
    ]
    print("milliseconds of one forward pass (relative to one node)\n")
    print(markdown_table(["nodes", *(f"context {context}" for context in contexts)], body))
    print(
        f"\ncopy bandwidth {roof.bandwidth / 1e9:.1f} GB/s; one token reads {roof.bytes_per_token / 1e6:.1f} MB: "
        f"roofline {roof.milliseconds:.2f} ms, of which a one-node pass reaches {100 * roof.reached:.0f}%"
    )


def copy_bandwidth(
    device: torch.device, synchronize: Callable[[], object], num_bytes: int = COPY_BYTES
) -> float:
    """Return bytes per second, read and written, of the best of several large copies on a device."""
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    copy = torch.empty_like(source)
    times = [seconds_of(partial(copy.copy_, source), synchronize) for _ in range(NUM_TIMED)]
    return 2 * num_bytes / min(times)


def roofline(target: TargetModel, context: int, one_node_milliseconds: float) -> Roofline:
    """Return the roofline of one token at a context length, and the share that a measured pass
    reaches.
    """
    bytes_per_token = bytes_of_token(target, context)
    bandwidth = copy_bandwidth(target.device, target.synchronize)
    milliseconds = 1e3 * bytes_per_token / bandwidth
    return Roofline(bandwidth, bytes_per_token, milliseconds, milliseconds / one_node_milliseconds)


def bytes_of_token(target: TargetModel, context: int) -> int:
    """Return the bytes of weights and cache that one token of plain decoding reads at a context length."""
    embedding = stored(target.model.get_input_embeddings())
    head = target.model.get_output_embeddings()
    tensors = (*target.model.parameters(), *packed_weights(target.model))
    weights = sum(tensor.nbytes for tensor in tensors)
    if head is None or stored(head) is not embedding:
        # An untied embedding gives one row a token; a tied one is read whole as the output head.
        weights -= embedding.nbytes
    cache = target.new_cache(context)
    return weights + cache.num_bytes * context // cache.capacity
