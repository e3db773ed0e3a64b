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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.command_line import OptionParser, UserError, run_command
from evaluation.questions import DATA_FOLDER
from model.drafter import drafter_class

METAVARS: dict[Any, str] = {int: "N", float: "X", str: "NAME"}
DTYPES = ("auto", "float32", "float64", "float16", "bfloat16")

EXAMPLES = """examples:
  # the demo model on the demo questions, on this machine
  python -m evaluation.inference_{method} --max-new-tokens 128

  # Spec-Bench on a GPU
  python -m scripts.download_data spec_bench
  python -m evaluation.inference_{method} --model-path lmsys/vicuna-7b-v1.3 \\
      --model-id vicuna-7b-v1.3-{method}-float16 --bench-name spec_bench --dtype float16
"""


def _option(default: Any, help_text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **metadata})


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Options of a run, whatever the method; names are Spec-Bench's where it has the option."""

    model_path: str = _option(
        str(DATA_FOLDER / "demo" / "model"), "folder or hub name of the target model"
    )
    model_id: str | None = _option(None, "name of the run in answers and tables (default: made up)")
    bench_name: str = _option("demo", "benchmark: a folder in data/ with a question.jsonl")
    question_file: str | None = _option(None, "JSONL file of questions, instead of --bench-name's")
    question_begin: int | None = _option(None, "index of the first question")
    question_end: int | None = _option(None, "index after the last question")
    answer_file: str | None = _option(
        None, "JSONL file of answers (default: data/BENCH/model_answer/MODEL_ID.jsonl)"
    )
    resume: bool = _option(
        False, "go on with an answer file that is there (this is also the default)"
    )
    overwrite: bool = _option(False, "begin anew instead of going on with an answer file")
    max_new_tokens: int = _option(1024, "limit of new tokens a turn", aliases=("--max-new-token",))
    num_choices: int = _option(1, "answers to each question")
    temperature: float = _option(0.0, "0: greedy; above: sampling")
    top_k: int = _option(0, "sample from the k likeliest tokens; 0: all")
    top_p: float = _option(1.0, "sample from the likeliest tokens with this total probability")
    seed: int = _option(0, "seed of sampling; choice i uses SEED + i, as in Spec-Bench")
    dtype: str = _option("auto", "auto: float32 on CPU, float16 elsewhere", choices=DTYPES)
    device: str = _option("auto", "auto, cpu, cuda, cuda:1, mps, ...")
    threads: int | None = _option(None, "CPU threads (default: torch's)")
    num_gpus_per_model: int = _option(1, "GPUs that one model is spread over")
    num_gpus_total: int = _option(1, "GPUs in all; must equal --num-gpus-per-model")
    conv_template: str = _option(
        "auto",
        "auto: fastchat's for models it knows, else the tokenizer's; tokenizer; a fastchat name",
    )
    warmup: int = _option(3, "unmeasured passes over the first question")

    def __post_init__(self) -> None:
        """Validate what needs no file and no device.

        Raises:
            ValueError: naming the option, what was given, what is allowed.
        """
        for name, lowest in (
            ("max_new_tokens", 1),
            ("num_choices", 1),
            ("top_k", 0),
            ("seed", 0),
            ("threads", 1),
            ("num_gpus_per_model", 1),
            ("num_gpus_total", 1),
            ("warmup", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ValueError(f"{name}: got {value}; allowed: {lowest} or more")
        if self.seed >= 2**63:
            raise ValueError(f"seed: got {self.seed}; allowed: less than 2**63")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: got {self.temperature}; allowed: 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}; allowed: above 0, at most 1")
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            raise ValueError(
                "top_k, top_p: need sampling; give a --temperature above 0, or leave them out"
            )
        if self.num_gpus_total != self.num_gpus_per_model:
            raise ValueError(
                f"num_gpus_total: got {self.num_gpus_total} with num_gpus_per_model {self.num_gpus_per_model}; "
                "allowed: equal numbers; run more workers as commands over parts of the questions "
                "(--question-begin, --question-end)"
            )
        if self.resume and self.overwrite:
            raise ValueError("resume, overwrite: got both; leave one out")
        if self.model_id is not None and (
            not self.model_id or Path(self.model_id).name != self.model_id
        ):
            raise ValueError(f"model_id: got {self.model_id!r}; allowed: a name without '/'")


def build_parser(method: str) -> argparse.ArgumentParser:
    """Return the parser of a method's inference command."""
    drafter = drafter_class(method)
    parser = OptionParser(
        prog=f"python -m evaluation.inference_{method}",
        description=f"Answer questions with {method}, into Spec-Bench's answer format.",
        epilog=EXAMPLES.format(method=method),
    )
    _add_options(parser.add_argument_group("run"), RunConfig)
    group = parser.add_argument_group(f"options of {method}")
    _add_options(group, drafter.config_class)
    if drafter.keeps_memory():
        group.add_argument(
            "--load-matrix", metavar="FILE", help="begin with a saved matrix (safetensors)"
        )
        group.add_argument(
            "--save-matrix", metavar="FILE", help="save the matrix when the run is done"
        )
    return parser


def _add_options(group: argparse._ArgumentGroup, config_class: type) -> None:
    """Add an option for every field of a config dataclass."""
    hints = typing.get_type_hints(config_class)
    for item in dataclasses.fields(config_class):
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
            options["choices"] = item.metadata.get("choices")
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


def parse(method: str, argv: Sequence[str] | None) -> tuple[RunConfig, Any, argparse.Namespace]:
    """Return the run's config, the method's config, and what was given for its matrix.

    Raises:
        UserError: if a value is not allowed.
    """
    given = vars(build_parser(method).parse_args(argv))
    method_class = drafter_class(method).config_class
    try:
        run, config = (
            cls(
                **{
                    item.name: given[item.name]
                    for item in dataclasses.fields(cls)
                    if item.name in given
                }
            )
            for cls in (RunConfig, method_class)
        )
    except ValueError as error:
        raise UserError(str(error)) from error
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
    from evaluation.inference import answer_with_method

    return answer_with_method(method, run, config, matrix.load, matrix.save)


def inference_command(method: str) -> None:
    """Be the inference command of a method: run it with the process's arguments and exit."""
    run_command(lambda argv: main(method, argv))
