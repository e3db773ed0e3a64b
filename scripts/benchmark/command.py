r"""Time a forward pass on this device, by nodes and context, and compare it with the memory roofline.

The cost curve says how many drafted nodes are worth their time. The roofline is the time in which a
copy reads what one token reads. `evaluation.compare` measures how fast methods answer.

Examples:
    python -m scripts.benchmark
    python -m scripts.benchmark --shape 150m --dtype bfloat16 --out costs.json
    python -m scripts.benchmark --model-path smollm2-135m --contexts 512 4096 --nodes 1 81
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Sequence

import torch

from evaluation.reporting.tables import json_line
from model.budget.threads import use_fastest_threads
from model.commands.command_line import OptionParser, UserError, user_errors
from model.commands.files import check_output, write_whole
from model.commands.loading import CheckedModel, check_model, load_target, target_of
from model.commands.model_options import ModelOptions
from model.commands.options import add_options, config_of
from model.engine.target import TargetModel
from scripts.benchmark.device_costs import (
    CONTEXTS,
    choose_contexts,
    conditions,
    cost_curve,
    print_costs,
    roofline,
)
from scripts.enlarge.arithmetic import SHAPES, scale_config
from scripts.enlarge.command import scaled_model

NODES = (1, 2, 4, 8, 16, 32, 64, 81, 128)
ORIGINAL_SHAPE = "demo"


def build_parser() -> argparse.ArgumentParser:
    parser = OptionParser(prog="python -m scripts.benchmark", description=__doc__)
    names = ("model_path", "dtype", "device", "threads", "graphs", "allow_pickle")
    add_options(parser, ModelOptions, names)
    parser.add_argument(
        "--shape",
        default=ORIGINAL_SHAPE,
        choices=(ORIGINAL_SHAPE, *SHAPES),
        help="enlarge the model in memory (default: %(default)s, as it is)",
    )
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        help=f"cached tokens (default: {' '.join(map(str, CONTEXTS))}, as far as the model's reaches)",
    )
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=NODES, help="sizes of trees (default: %(default)s)"
    )
    parser.add_argument("--out", metavar="JSON", help="write the last line, the report, here too")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.out:
        check_output(args.out, "out")
    for name in ("contexts", "nodes"):
        if min(getattr(args, name) or (1,)) < 1:
            raise UserError(f"{name}: got {min(getattr(args, name))}; allowed: 1 or more")
    options = config_of(ModelOptions, vars(args))
    model = check_model(options)
    contexts = choose_contexts(args.contexts, model.hf_config.get_text_config(decoder=True))
    target = _load(args.shape, options, model)
    if options.threads is None and (choice := use_fastest_threads(target)):
        print(f"{choice}; --threads sets it", file=sys.stderr)
    nodes = sorted({1, *args.nodes})  # costs are relative to one node
    curve = cost_curve(target, nodes, contexts)
    roof = roofline(target, contexts[0], curve[0].milliseconds)
    report = {
        **conditions(argv, model),
        "shape": args.shape,
        "graphs": options.graphs,
        "preparation": target.shapes.preparation._asdict(),
        "peak_memory_bytes": _peak_memory(model.device),
        "cost_curve": [point._asdict() for point in curve],
        "roofline": roof._asdict(),
    }
    if args.out:  # before anything is printed: a reader such as `head` may leave
        write_whole(args.out, json_line(report) + "\n")
    print_costs(curve, roof)
    print(json_line(report))
    return 0


def _load(shape: str, options: ModelOptions, model: CheckedModel) -> TargetModel:
    if shape == ORIGINAL_SHAPE:
        return load_target(options, model)
    with user_errors():
        scale_config(model.hf_config, SHAPES[shape])
    small = load_target(options, model._replace(dtype=torch.float32)).model
    return target_of(scaled_model(small, SHAPES[shape], model.dtype), options)


def _peak_memory(device: torch.device) -> int:
    """Return the most bytes held so far: of the device on a GPU, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
