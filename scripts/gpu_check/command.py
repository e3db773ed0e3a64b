r"""Check in ten minutes whether the path that only a GPU takes is right and fast there.

Ten blocks, from the device's facts to questions answered in turn. One that fails leaves a line in the
report, and the others go on; one that would not fit into the time is left out and says so. What is known
without a GPU, and what is not, is in docs/gpu.md.

Examples:
    python -m scripts.gpu_check --out gpu.json
    python -m scripts.gpu_check --blocks 0 1 3 --minutes 3
    python -m scripts.gpu_check --compile --minutes 30
    python -m scripts.gpu_check --device simulated     # on any machine: tries the code, measures nothing

Exit code: 0 if no block failed, 1 if one did, 2 if something given cannot be used.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from evaluation.reporting.tables import json_line
from model.commands.command_line import OptionParser, UserError
from model.commands.device import nvidia_driver
from model.commands.files import check_output, write_whole
from model.commands.model_options import DEMO_MODEL, ModelOptions
from model.commands.options import add_options
from model.commands.options import config_of as options_of
from model.kernels.sdpa import sdpa_backends
from scripts.enlarge.arithmetic import SHAPES
from scripts.gpu_check.bench import AS_IT_IS, Bench
from scripts.gpu_check.blocks.attention import attention
from scripts.gpu_check.blocks.decoding import decoding
from scripts.gpu_check.blocks.device import device_facts
from scripts.gpu_check.blocks.methods import every_method
from scripts.gpu_check.blocks.passes import passes
from scripts.gpu_check.blocks.preparation import captures, compilations
from scripts.gpu_check.blocks.questions import questions
from scripts.gpu_check.blocks.steps import whole_steps
from scripts.gpu_check.blocks.verdicts import verdicts
from scripts.gpu_check.findings import FAILED, PASSED, SKIPPED, Findings, Result, one_line
from scripts.gpu_check.report import NO_MEASUREMENT, print_result, print_summary, report_of
from scripts.gpu_check.sizes import ON_GPU, SIMULATED
from tests.simulated_device.device import SimulatedCuda

SIMULATED_DEVICE, REAL_DEVICE = "simulated", "cuda"
DEFAULT_SHAPE = "7b"
DEFAULT_MINUTES = 10.0


class Block(NamedTuple):
    """A part of the check.

    Attributes:
        number: its name.
        title: what it is about.
        seconds: what it may take on a GPU; with less time left it is skipped.
        run: takes the bench to the findings.
        needs_compile: whether it is for `--compile` alone.
        needs_model: whether it runs the model that was asked for.
    """

    number: int
    title: str
    seconds: float
    run: Callable[[Bench], Findings]
    needs_compile: bool = False
    needs_model: bool = True


# The verdicts come last, so that they know all; estimates are for one H100, and have never been measured.
BLOCKS = (
    Block(0, "the device", 10, device_facts, needs_model=False),
    Block(1, "every method against the CPU", 60, every_method, needs_model=False),
    Block(2, "attention backends", 20, attention, needs_model=False),
    Block(3, "passes", 90, passes),
    Block(4, "a whole step and its parts", 60, whole_steps),
    Block(5, "answers", 120, decoding),
    Block(6, "captures", 60, captures),
    Block(7, "compilations", 300, compilations, needs_compile=True),
    Block(9, "questions in turn", 30, questions),
    Block(8, "verdicts", 0, verdicts, needs_model=False),
)


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = OptionParser(prog="python -m scripts.gpu_check", description=__doc__)
    parser.add_argument(
        "--device",
        choices=(REAL_DEVICE, SIMULATED_DEVICE),
        default=REAL_DEVICE,
        help="a GPU, or one that is simulated on the CPU (default: %(default)s)",
    )
    parser.add_argument(
        "--blocks",
        type=int,
        nargs="+",
        metavar="N",
        help=f"run these alone (default: all of {', '.join(str(block.number) for block in BLOCKS)})",
    )
    parser.add_argument(
        "--minutes", type=float, default=DEFAULT_MINUTES, help="time limit (%(default)s)"
    )
    parser.add_argument(
        "--shape",
        choices=(AS_IT_IS, *SHAPES),
        help=f"enlarge the demo model in memory (default: {DEFAULT_SHAPE}; {AS_IT_IS}, its own, on the "
        "simulated device and with --model-path)",
    )
    add_options(parser, ModelOptions, ("model_path", "dtype", "allow_pickle"))
    parser.add_argument(
        "--compile", action="store_true", help="measure compiled passes, too; takes many minutes"
    )
    parser.add_argument("--out", metavar="JSON", help="write the report here")
    parser.add_argument("--debug", action="store_true", help="tracebacks of blocks that fail")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check.

    Returns:
        0, or 1 if a block failed.

    Raises:
        UserError: if something given cannot be used.
    """
    start = time.perf_counter()
    args = build_parser().parse_args(argv)
    chosen = _checked(args)
    gpu = SimulatedCuda() if args.device == SIMULATED_DEVICE else None
    if gpu is None:
        _need_gpu()
    given = list(argv) if argv is not None else sys.argv[1:]
    with gpu or nullcontext():
        bench = _bench(args, gpu, start + 60 * args.minutes)
        bench.device_facts["sdpa_before_us"] = sdpa_backends(bench.device)
        if any(block.needs_model for block in chosen):
            # A mistake is told before anything is measured.
            bench.say(f"model: {bench.options.model_path} ({bench.shape}), {bench.checked.dtype}")
        for block in chosen:
            bench.results[block.number] = result = run_block(block, bench, args.debug)
            print_result(result, bench.is_simulated)
            if args.out:  # after every block: a device may take the process with it
                write_whole(args.out, json_line(report_of(bench, given)) + "\n")
    results = list(bench.results.values())
    print_summary(results)
    if bench.is_simulated:
        print(f"\n{NO_MEASUREMENT}")
    return int(any(result.status == FAILED for result in results))


def run_block(block: Block, bench: Bench, with_traceback: bool = False) -> Result:
    """Run a block if there is time; whatever it raises is one line of its findings."""
    reason = _reason_to_skip(block, bench)
    if reason:
        return Result(block.number, block.title, SKIPPED, 0.0, Findings(notes=[reason]))
    bench.say(f"block {block.number}: {block.title}")
    start = time.perf_counter()
    try:
        found = block.run(bench)
    except Exception as error:  # on an unknown device anything may be raised
        if with_traceback:
            traceback.print_exc()
        found = Findings(problems=[one_line(error)])
    status = FAILED if found.problems else PASSED
    return Result(block.number, block.title, status, time.perf_counter() - start, found)


def _reason_to_skip(block: Block, bench: Bench) -> str:
    if block.needs_compile and not bench.use_compile:
        return "is for --compile"
    if not bench.is_simulated and bench.seconds_left < block.seconds:
        return (
            f"takes about {block.seconds:.0f} s, and {max(0.0, bench.seconds_left):.0f} s are left; give more "
            f"--minutes, or --blocks {block.number} alone"
        )
    return ""


def _checked(args: argparse.Namespace) -> list[Block]:
    """Return the chosen blocks.

    Raises:
        UserError: if an option cannot be used.
    """
    known = sorted(block.number for block in BLOCKS)
    for number in args.blocks or ():
        if number not in known:
            raise UserError(f"blocks: got {number}; allowed: {known[0]} to {known[-1]}")
    if not 0 < args.minutes < float("inf"):
        raise UserError(f"minutes: got {args.minutes}; allowed: more than 0")
    if args.out:
        check_output(args.out, "out")
    if args.compile and args.device == SIMULATED_DEVICE:
        raise UserError(
            "compile: got it with --device simulated, where no code is compiled; leave it out"
        )
    if (args.shape or AS_IT_IS) != AS_IT_IS and hasattr(args, "model_path"):
        raise UserError(
            f"shape: got {args.shape} with --model-path; allowed: one of them, for a shape is the demo model's"
        )
    return [block for block in BLOCKS if not args.blocks or block.number in args.blocks]


def _need_gpu() -> None:
    """Raise UserError if torch has no GPU here."""
    if torch.cuda.is_available():
        return
    driver = nvidia_driver()
    cause = f"the driver is {driver}" if driver else "there is no NVIDIA driver"
    raise UserError(
        f"device: got {REAL_DEVICE}, but torch {torch.__version__} (built for CUDA {torch.version.cuda}) has no "
        f"GPU here, and {cause}; run it on a machine with a GPU, or give --device {SIMULATED_DEVICE}"
    )


def _bench(args: argparse.Namespace, gpu: SimulatedCuda | None, deadline: float) -> Bench:
    is_demo = not hasattr(args, "model_path")
    default = DEFAULT_SHAPE if gpu is None and is_demo else AS_IT_IS
    given = {"dtype": "float16", "model_path": str(DEMO_MODEL)} | vars(args)
    # On the simulated device choosing kernels takes long, and means nothing.
    given |= {"device": REAL_DEVICE, "kernels": "auto" if gpu is None else "off"}
    names = ("model_path", "dtype", "allow_pickle", "device", "kernels")
    options = options_of(ModelOptions, {name: given[name] for name in names if name in given})
    return Bench(
        options,
        args.shape or default,
        ON_GPU if gpu is None else SIMULATED,
        deadline,
        gpu,
        args.compile,
    )
