r"""Check in ten minutes whether the GPU path is right and fast on this GPU.

Laws (`pytest -m gpu`), costs and answers (`evaluation.compare`), then verdicts. If a part fails, a line
in the report says so, and the others go on. A part that would take too long is left out, with a note.
docs/gpu.md says what is known so far.

Examples:
    python -m scripts.gpu_check --out gpu.json
    python -m scripts.gpu_check --parts device laws passes --minutes 3
    python -m scripts.gpu_check --device simulated     # on any machine: tries the code, measures nothing

Exit code: 0 if no part failed, 1 if one did, 2 if an option cannot be used.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch

from evaluation.answers.record import git_commit
from evaluation.reporting.tables import json_line
from model.budget.cost_model import CostModel
from model.commands.command_line import OptionParser, UserError, add_options, config_of, run_command
from model.commands.files import check_output, write_whole
from model.commands.model_options import DEMO_MODEL, ModelOptions, nvidia_driver
from model.kernels.registered_attention import sdpa_backends
from model.machine.packages import versions
from scripts.enlarge import SHAPES
from scripts.gpu_check.answers import answers, batches
from scripts.gpu_check.bench import FAILED, ORIGINAL_SHAPE, SKIPPED, Bench, Found, one_line, say
from scripts.gpu_check.costs import device_facts, kernels, laws, passes, whole_steps
from scripts.gpu_check.verdicts import verdicts

SIMULATED_DEVICE, REAL_DEVICE = "simulated", "cuda"
DEFAULT_SHAPE = "7b"
DEFAULT_MINUTES = 10.0


class CheckPart(NamedTuple):
    name: str
    seconds: float  # what it may take on a GPU; with less time left it is skipped
    run: Callable[[Bench, Found], None]  # adds to what was found
    needs_model: bool = True  # whether it runs the model that was asked for


# One H100 took 0.3, 80, 19 and 30 s, and about 100 s for the answers. A real model must be loaded, and a slower
# host takes longer.
PARTS = (
    CheckPart("device", 10, device_facts, needs_model=False),
    CheckPart("laws", 90, laws, needs_model=False),
    CheckPart("passes", 90, passes),
    CheckPart("kernels", 30, kernels),
    CheckPart("steps", 90, whole_steps),
    CheckPart("answers", 150, answers),
    CheckPart("batches", 60, batches),
)


def main(argv: Sequence[str] | None = None) -> int:
    start = time.perf_counter()
    parser = OptionParser(prog="python -m scripts.gpu_check", description=__doc__)
    add = parser.add_argument
    add(
        "--device",
        choices=(REAL_DEVICE, SIMULATED_DEVICE),
        default=REAL_DEVICE,
        help="a GPU, or one that is simulated on the CPU (default: %(default)s)",
    )
    names = [part.name for part in PARTS]
    add(
        "--parts",
        nargs="+",
        choices=names,
        metavar="NAME",
        default=names,
        help=f"run only some of {', '.join(names)}",
    )
    add("--minutes", type=float, default=DEFAULT_MINUTES, help="time limit (%(default)s)")
    add(
        "--shape",
        choices=(ORIGINAL_SHAPE, *SHAPES),
        help=f"enlarge the demo model in memory (default: {DEFAULT_SHAPE}; {ORIGINAL_SHAPE}, its own, on the "
        "simulated device and with --model-path)",
    )
    add_options(parser, ModelOptions, ("model_path", "dtype", "allow_pickle"))
    add("--out", metavar="JSON", help="write the report here")
    args = parser.parse_args(argv)
    _check(args)
    chosen = [part for part in PARTS if part.name in args.parts]
    is_real = args.device == REAL_DEVICE
    device, given_costs = (nullcontext(), None) if is_real else _simulated()
    found: dict[str, Found] = {}
    with device:
        bench = _bench(args, given_costs, start + 60 * args.minutes)
        report: dict[str, Any] = {
            "argv": list(argv) if argv is not None else sys.argv[1:],
            "simulated": bench.is_simulated,
            "times_are_measurements": not bench.is_simulated,
            "model_path": bench.options.model_path,
            "shape": bench.shape,
            "git_commit": git_commit(),
            "versions": versions(),
            # Before cuDNN's attention is turned off, as in all commands.
            "sdpa_before_us": sdpa_backends(bench.device),
            "verdicts": [],
        }
        if any(part.needs_model for part in chosen):
            # A mistake is told before anything is measured.
            say(f"model: {bench.options.model_path} ({bench.shape}), {bench.checked.dtype}")
        for part in chosen:
            found[part.name] = run_part(part, bench)
            report["parts"] = {name: asdict(one) for name, one in found.items()}
            if args.out:  # after every part: a device may take the process with it
                write_whole(args.out, json_line(report) + "\n")
        report["verdicts"] = [one._asdict() for one in verdicts(bench, found)]
    if args.out:
        write_whole(args.out, json_line(report) + "\n")
    return int(any(one.status == FAILED for one in found.values()))


def run_part(part: CheckPart, bench: Bench) -> Found:
    """Run a part if there is time; what it raises is one line of its problems, and on standard error."""
    found, start = Found(), time.perf_counter()
    if not bench.is_simulated and bench.seconds_left < part.seconds:
        found.status = SKIPPED
        found.notes.append(
            f"takes about {part.seconds:.0f} s, and {max(0.0, bench.seconds_left):.0f} s are left; give more "
            f"--minutes, or --parts {part.name} alone"
        )
    else:
        say(f"part: {part.name}")
        try:
            part.run(bench, found)
        except Exception as error:  # on an unknown device anything may be raised
            traceback.print_exc()
            found.problems.append(one_line(error))
        if found.problems:
            found.status = FAILED
    found.seconds = round(time.perf_counter() - start, 3)
    lines = [*found.notes, *(f"PROBLEM: {problem}" for problem in found.problems)]
    print(
        f"\n## {part.name}: {found.status}, {found.seconds:.1f} s", *lines, sep="\n- ", flush=True
    )
    return found


def _check(args: argparse.Namespace) -> None:
    if not 0 < args.minutes < float("inf"):
        raise UserError(f"minutes: got {args.minutes}; allowed: more than 0")
    if args.out:
        check_output(args.out, "out")
    if (args.shape or ORIGINAL_SHAPE) != ORIGINAL_SHAPE and hasattr(args, "model_path"):
        raise UserError(
            f"shape: got {args.shape} with --model-path; allowed: one of them: a shape "
            "enlarges the demo model"
        )
    if args.device == REAL_DEVICE and not torch.cuda.is_available():
        driver = nvidia_driver()
        cause = f"the driver is {driver}" if driver else "there is no NVIDIA driver"
        raise UserError(
            f"device: got {REAL_DEVICE}, but torch {torch.__version__} (built for CUDA {torch.version.cuda}) has "
            f"no GPU here, and {cause}; run it on a machine with a GPU, or give --device {SIMULATED_DEVICE}"
        )


def _simulated() -> tuple[AbstractContextManager[object], Callable[[], CostModel]]:
    """Return the simulated device of the tests, and what makes the costs of a step on it."""
    try:
        from tests.simulated_device.device import SimulatedCuda
        from tests.simulated_device.given_costs import NEARLY_FLAT, GivenCosts
    except ImportError as error:
        raise UserError(
            f"device: got {SIMULATED_DEVICE}, which is in tests/ of a checkout ({error}); run it there"
        ) from error
    return SimulatedCuda(), partial(GivenCosts, *NEARLY_FLAT)


def _bench(
    args: argparse.Namespace, given_costs: Callable[[], CostModel] | None, deadline: float
) -> Bench:
    is_real, is_demo = given_costs is None, not hasattr(args, "model_path")
    default = DEFAULT_SHAPE if is_real and is_demo else ORIGINAL_SHAPE
    # On the simulated device half precision and choosing kernels take long, and mean nothing.
    dtype = "float16" if is_real else "float32"
    given = {"dtype": dtype, "model_path": str(DEMO_MODEL)} | vars(args)
    given |= {"device": REAL_DEVICE, "kernels": "auto" if is_real else "off"}
    names = ("model_path", "dtype", "allow_pickle", "device", "kernels")
    options = config_of(ModelOptions, {name: given[name] for name in names if name in given})
    return Bench(options, args.shape or default, deadline, given_costs)


if __name__ == "__main__":
    run_command(main)
