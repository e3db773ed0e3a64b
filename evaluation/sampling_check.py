r"""Is sampling exact? Draws of every method against the exact distribution, and against plain decoding.

`checking/sampling.py` says how.

Run:
    python -m evaluation.sampling_check --method recycling lookahead

Exit code: 0 all checks pass, 1 one fails, 2 wrong usage.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product

from transformers.utils import logging as transformers_logging

from evaluation.checking.sampling import SETTINGS, Sampler
from evaluation.reporting.tables import json_line, markdown_table
from model.commands.command_line import OptionParser, UserError, run_command, user_errors
from model.machine.timing import progress
from model.methods import METHODS, find_method

EXAMPLES = """\
examples:
  python -m evaluation.sampling_check
  python -m evaluation.sampling_check --method recycling --num-samples 20000 --seed 1
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each check and one line of JSON; return 1 if a check fails."""
    options = _parse(argv)
    transformers_logging.disable_progress_bar()
    sampler = Sampler(options.seed)
    asked = list(product(options.method, SETTINGS))
    with progress(asked, unit="check") as bar:
        checks = [sampler.check(method, setting, options.num_samples) for method, setting in bar]
    header = ["Method", "Setting", "Samples", "p", "Total variation", "Impossible", "Texts differ"]
    rows = [
        [
            *(check.method, check.setting, str(check.num_samples), f"{check.p_value:.3g}"),
            *(f"{check.total_variation:.4f}", str(check.num_impossible), str(check.num_differing)),
            *(f"{check.mean_accepted:.2f}", "yes" if check.is_passed else "NO"),
        ]
        for check in checks
    ]
    print(markdown_table([*header, "MAT", "Exact"], rows, num_text_columns=2))
    is_passed = all(check.is_passed for check in checks)
    print(json_line({"passed": is_passed, "checks": [asdict(check) for check in checks]}))
    return 0 if is_passed else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(
        prog="python -m evaluation.sampling_check",
        description="Compare samples of methods with the exact distribution of a small model.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--method", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument(
        "--num-samples",
        type=int,
        default=1000,
        metavar="N",
        help="short texts for each method and setting (default: 1000)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="SEED", help="default: 0")
    options = parser.parse_args(argv)
    if options.num_samples < 1:
        raise UserError(f"num_samples: got {options.num_samples}; allowed: 1 or more")
    if not 0 <= options.seed < 2**63:
        raise UserError(f"seed: got {options.seed}; allowed: 0 or more, less than 2**63")
    with user_errors():
        options.method = [find_method(name).name for name in options.method or METHODS]
    return options


if __name__ == "__main__":
    run_command(main)
