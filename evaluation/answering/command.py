"""The command line that all inference commands share.

Options come from two dataclasses: `RunConfig`, the same for every method, and the method's own
config. Defaults live there and nowhere else. Everything that can be known to be wrong is said
before the weights load.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from evaluation.answering.config import RunConfig
from evaluation.questions.questions import DATA_FOLDER
from model.commands.command_line import OptionParser, run_command, user_errors
from model.methods.registry import drafter_class

METAVARS: dict[Any, str] = {int: "N", float: "X", str: "NAME"}

EXAMPLES = """examples:
  # the demo model on the demo questions, on this machine
  python -m evaluation.inference_{method} --max-new-tokens 128{demo}

  # Spec-Bench on a GPU
  python -m scripts.download_data spec_bench
  python -m evaluation.inference_{method} --model-path lmsys/vicuna-7b-v1.3 \\
      --model-id vicuna-7b-v1.3-{method}-float16 --bench-name spec_bench --dtype float16{large}
"""
# What an example needs beside, for methods that draft with a model.
DRAFT_MODELS = {
    "demo": " --draft-model data/demo/draft",
    "large": " \\\n      --draft-model double7/vicuna-68m",
}


def build_parser(method: str) -> argparse.ArgumentParser:
    """Return the parser of a method's inference command."""
    drafter = drafter_class(method)
    needed = DRAFT_MODELS if drafter.drafts_with_model() else dict.fromkeys(DRAFT_MODELS, "")
    parser = OptionParser(
        prog=f"python -m evaluation.inference_{method}",
        description=f"Answer questions with {method}, into Spec-Bench's answer format.",
        epilog=EXAMPLES.format(method=method, **needed),
    )
    add_options(parser.add_argument_group("run"), RunConfig)
    group = parser.add_argument_group(f"options of {method}")
    add_options(group, drafter.config_class)
    if drafter.keeps_memory():
        group.add_argument(
            "--load-matrix", metavar="FILE", help="begin with a saved matrix (safetensors)"
        )
        group.add_argument(
            "--save-matrix", metavar="FILE", help="save the matrix when the run is done"
        )
    return parser


def add_options(
    group: argparse._ActionsContainer, config_class: type, names: Collection[str] | None = None
) -> None:
    """Add an option for every field of a config dataclass, or for those of these names; one that is not
    given is no attribute of what is parsed.
    """
    hints = typing.get_type_hints(config_class)
    for item in dataclasses.fields(config_class):
        if names is not None and item.name not in names:
            continue
        flags = ["--" + item.name.replace("_", "-"), *item.metadata.get("aliases", ())]
        kind = _value_type(hints[item.name])
        text = item.metadata["help"].replace("%", "%%")
        if item.default is not None and kind is not bool:
            text += f" (default: {_shown(item.default)})"
        options: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS, "help": text}
        if kind is bool:
            is_switch = item.default is False
            options["action"] = "store_true" if is_switch else argparse.BooleanOptionalAction
        else:
            options["type"] = kind
            options["choices"] = item.metadata.get("choices") or None
            options["metavar"] = None if options["choices"] else METAVARS[kind]
        group.add_argument(*flags, **options)


def _value_type(hint: Any) -> Callable[[str], Any]:
    """Return the type of a field's values: X of X or X | None."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


def _shown(default: Any) -> str:
    """Spell a default without this machine's folders."""
    text = str(default)
    root = str(DATA_FOLDER.parent) + "/"
    return text.removeprefix(root)


def config_of(config_class: type, given: Mapping[str, Any]) -> Any:
    """Return a config with what was given of its options.

    Raises:
        UserError: if a value is not allowed.
    """
    names = [item.name for item in dataclasses.fields(config_class) if item.name in given]
    with user_errors():
        return config_class(**{name: given[name] for name in names})


def parse(method: str, argv: Sequence[str] | None) -> tuple[RunConfig, Any, argparse.Namespace]:
    """Return the run's config, the method's config, and what was given for its matrix.

    Raises:
        UserError: if a value is not allowed.
    """
    given = vars(build_parser(method).parse_args(argv))
    method_class = drafter_class(method).config_class
    run, config = (config_of(cls, given) for cls in (RunConfig, method_class))
    matrix = argparse.Namespace(load=given.get("load_matrix"), save=given.get("save_matrix"))
    return run, config, matrix


def main(method: str, argv: Sequence[str] | None = None) -> int:
    """Run a method's inference command.

    Returns:
        0, or 1 if a question failed.

    Raises:
        UserError: if something given cannot be used.
    """
    run, config, matrix = parse(method, argv)
    from evaluation.answering.run import answer_with_method

    return answer_with_method(method, run, config, matrix.load, matrix.save)


def inference_command(method: str) -> None:
    """Be the inference command of a method: run it with the process's arguments and exit."""
    run_command(lambda argv: main(method, argv))
