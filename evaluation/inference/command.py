"""The command line that all inference commands share.

Options come from dataclasses: the parts of `RunConfig`, the same for every method, and the method's
own config. Defaults live there and nowhere else. Everything that can be known to be wrong is said
before the weights load.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.inference.config import PARTS, RunConfig
from model.commands.command_line import (
    OptionParser,
    add_options,
    config_of,
    run_command,
    user_errors,
)
from model.methods import Method, find_method

EXAMPLES = """examples:
  # the demo model on the demo questions, on this machine
  python -m {command} --max-new-tokens 128{demo}

  # Spec-Bench on a GPU
  python -m scripts.download_data spec_bench
  python -m {command} --model-path lmsys/vicuna-7b-v1.3 \\
      --model-id vicuna-7b-v1.3-{method}-float16 --bench-name spec_bench --dtype float16{large}
"""
# Spec-Bench's names of methods, where they are others.
SPEC_BENCH_NAMES = {"baseline": "vanilla"}
# What an example needs beside, by what a method drafts with.
NEEDED = {
    "": {"demo": "", "large": ""},
    "draft_model": {
        "demo": " --draft-model data/demo/draft",
        "large": " \\\n      --draft-model double7/vicuna-68m",
    },
    "datastore": {
        "demo": " --datastore data/demo/datastore.npy",
        "large": " \\\n      --datastore vicuna.npy",
    },
    "heads": {
        "demo": " --heads data/demo/{method}",
        "large": " \\\n      --heads {method}-vicuna-7b-v1.3",
    },
}


def build_parser(method: Method, command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of a method's inference command.

    `command` is what is typed after `python -m`; None: Spec-Bench's name for it.
    """
    name, drafter = method.name, method.drafter_class
    command = command or f"evaluation.inference_{name}"
    needed = {
        example: words.format(method=method.heads_of)
        for example, words in NEEDED[drafter.drafts_with()].items()
    }
    parser = OptionParser(
        prog=f"python -m {command}",
        description=f"Answer questions with {name}, into Spec-Bench's answer format.",
        epilog=EXAMPLES.format(command=command, method=name, **needed),
    )
    for title, part in PARTS.items():
        add_options(parser.add_argument_group(title), part)
    group = parser.add_argument_group(f"options of {name}")
    add_options(group, method.config_class)
    if drafter.keeps_memory():
        group.add_argument(
            "--load-matrix", metavar="FILE", help="begin with a saved matrix (safetensors)"
        )
        group.add_argument(
            "--save-matrix", metavar="FILE", help="save the matrix when the run is done"
        )
    return parser


def parse(
    method: Method, argv: Sequence[str] | None, command: str | None = None
) -> tuple[RunConfig, Any, argparse.Namespace]:
    """Return the run's config, the method's config, and what was given for its matrix.

    Raises:
        UserError: if a value is not allowed.
    """
    given = vars(build_parser(method, command).parse_args(argv))
    with user_errors():
        run = RunConfig.of(given)
    config: Any = config_of(method.config_class, given)
    matrix = argparse.Namespace(load=given.get("load_matrix"), save=given.get("save_matrix"))
    return run, config, matrix


def main(name: str, argv: Sequence[str] | None = None, command: str | None = None) -> int:
    """Run a method's inference command, `command` as in `build_parser`; return 1 if a question failed."""
    with user_errors():
        method = find_method(name)
    run, config, matrix = parse(method, argv, command)
    from evaluation.inference.plan import Participant
    from evaluation.inference.run import answer_with_method

    return answer_with_method(Participant(name, method, config), run, matrix.load, matrix.save)


def inference_command(name: str, file: str) -> None:
    """Run the inference command that a file is named after and exit; an import of the file does nothing.

    `name` is the file's `__name__`.
    """
    if name == "__main__":
        command = Path(file).stem.removeprefix("inference_")
        run_command(lambda argv: main(SPEC_BENCH_NAMES.get(command, command), argv))
