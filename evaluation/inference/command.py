"""The command line that all inference commands share, and the words that name the participants of a comparison.

Options come from dataclasses: the parts of `RunConfig`, the same for every method, and the method's own config.
Defaults live there and nowhere else. Everything that can be known to be wrong is said before the weights load.

A participant is named as its inference command spells it, without what all have in common: "pld",
"recycling --tree-version 2.2.2". NAME-auto is the method with its automatic number of nodes. An address
such as http://127.0.0.1:8000 is an OpenAI-compatible server.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evaluation.inference.client import SCHEMES, EndpointConfig
from evaluation.inference.config import PARTS, RunConfig
from evaluation.inference.engines.participant import DRAFT, ENGINES
from evaluation.inference.plan import Participant
from evaluation.inference.servers import Server
from evaluation.inference.transformers_generate import ASSISTED, TRANSFORMERS
from model.commands.command_line import (
    OptionParser,
    UserError,
    add_options,
    config_of,
    run_command,
    user_errors,
)
from model.commands.model_options import DEMO_MODEL
from model.methods import METHODS, Method, find_method
from model.options import unknown_name

EXAMPLES = """examples:
  # the demo model on the demo questions, on this machine
  python -m {command} --max-new-tokens 128{demo}

  # Spec-Bench on a GPU
  python -m scripts.download_data spec_bench
  python -m {command} --model-path lmsys/vicuna-7b-v1.3 \\
      --model-id vicuna-7b-v1.3-{method}-float16 --bench-name spec_bench --dtype float16{large}
"""
# What the two examples need beside, by what a method drafts with.
NEEDED = {
    "draft_model": ("data/demo/draft", "double7/vicuna-68m"),
    "datastore": ("data/demo/datastore.npy", "vicuna.npy"),
    "heads": ("data/demo/{method}", "{method}-vicuna-7b-v1.3"),
}
AUTO = "-auto"
BASELINE = "vanilla"
OTHERS = TRANSFORMERS | ENGINES


def build_parser(method: Method, command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of a method's inference command.

    `command` is what is typed after `python -m`; None: Spec-Bench's name for it.
    """
    name, drafter = method.name, method.drafter_class
    command = command or f"evaluation.inference_{name.replace('-', '_')}"
    needed = {"demo": "", "large": ""}
    if kind := drafter.drafts_with():
        option = f"--{kind.replace('_', '-')}"
        demo, large = (words.format(method=method.heads_of) for words in NEEDED[kind])
        needed = {"demo": f" {option} {demo}", "large": f" \\\n      {option} {large}"}
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
    """Return the run's config, the method's, and what was given for its matrix; a `UserError` if one is wrong."""
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
    from evaluation.inference.run import answer_with_method

    return answer_with_method(Participant(name, method, config), run, matrix.load, matrix.save)


def inference_command(name: str, file: str) -> None:
    """Run the inference command that a file is named after and exit; an import of the file does nothing.

    `name` is the file's `__name__`.
    """
    if name == "__main__":
        command = Path(file).stem.removeprefix("inference_")
        # Spec-Bench has another name for it.
        method = BASELINE if command == "baseline" else command.replace("_", "-")
        run_command(lambda argv: main(method, argv))


def participants_of(
    words: Sequence[str],
    model_path: str,
    draft_model: str | None = None,
    needs_baseline: bool = True,
) -> list[Participant]:
    """Return the participants of these words, such as "recycling --start cold", the baseline first.

    Participants that need a draft model and name none have `draft_model`; the demo model has one by default. The
    baseline may be missing if it is not needed, or where all are servers. A `UserError` if a method, an option or a
    draft model is unknown, missing or not allowed.
    """
    are_servers = all(one.startswith(SCHEMES) for one in words)
    if needs_baseline and BASELINE not in words and not are_servers:
        raise UserError(
            f"methods: got {' '.join(words)}; {BASELINE}, the baseline, must be among them"
        )
    needing = [one for one in words if _needs_draft_model(one)]
    if draft_model is not None and not needing:
        raise UserError(
            f"draft_model: got {draft_model}; only sps, {ASSISTED} and {DRAFT} use it; add one of them to "
            "--methods, or leave out --draft-model"
        )
    if draft_model is None and Path(model_path).resolve() == DEMO_MODEL:
        draft_model = str(DEMO_MODEL.with_name("draft"))
    if needing and draft_model is None:
        raise UserError(f"draft_model: got none; give the model that {needing[0]} drafts with")
    heads = DEMO_MODEL.parent if Path(model_path).resolve() == DEMO_MODEL else None
    in_order = sorted(words, key=lambda one: one != BASELINE)
    found = [participant_of(one, draft_model, heads) for one in in_order]
    labels = [participant.label for participant in found]
    if len(set(labels)) < len(labels):
        raise UserError(f"methods: got {' '.join(words)}; allowed: each once")
    return found


def participant_of(
    words: str, draft_model: str | None = None, heads: Path | None = None
) -> Participant:
    """Return the participant of these words; `heads`: a folder of heads. Errors as `participants_of`."""
    name, *options = _split(words)
    if name.startswith(SCHEMES):
        of_client = ("served_model", "api_key_env", "timeout")
        config = _with_options(name, EndpointConfig(name), options, of_client)
        return Participant(words, Server(config.base_url), config)
    if name in OTHERS:
        program = OTHERS[name]
        if options and not program.option_names:
            raise UserError(f"methods: got {words!r}; {name} takes no options")
        config = _with_options(name, program.config(draft_model), options, program.option_names)
        return Participant(words, program, config)
    method = _method_of(name)
    given = list(options)
    if name.endswith(AUTO):
        for option, value in method.drafter_class.auto_options.items():
            given += [f"--{option.replace('_', '-')}", value]
    if _needs_draft_model(words):
        given += ["--draft-model", str(draft_model)]
    if method.drafter_class.drafts_with() == "heads" and not _names("--heads", options):
        if heads is None:
            raise UserError(
                f'heads: got none; name the folder of {method.heads_of}\'s heads: "{name} --heads FOLDER"'
            )
        given += ["--heads", str(heads / method.heads_of)]
    run, config, matrix = parse(method, given)
    if run != RunConfig() or matrix.load or matrix.save:
        raise UserError(
            f"methods: got {words!r}; allowed: options of {method.name} itself, without a saved matrix"
        )
    return Participant(words, method, config)


def _with_options(name: str, config: Any, options: Sequence[str], names: Sequence[str]) -> Any:
    """Return a config with the options that follow a participant's name, which may be of these names."""
    parser = OptionParser(prog=name)
    add_options(parser, type(config), names)
    with user_errors():
        return replace(config, **vars(parser.parse_args(options)))


def _method_of(name: str) -> Method:
    """Return the method of a name, with or without `AUTO`."""
    base = name.removesuffix(AUTO)
    with user_errors():
        if base in METHODS or ":" in base:
            method = find_method(base)
            if base == name or method.drafter_class.auto_options:
                return method
        known = [*METHODS]
        known += [one + AUTO for one in METHODS if find_method(one).drafter_class.auto_options]
    raise UserError(unknown_name("methods", name, [*known, *OTHERS]))


def _split(words: str) -> list[str]:
    try:
        return shlex.split(words) or [""]
    except ValueError as error:
        raise UserError(f"methods: got {words!r}: {error}; close the quotation") from error


def _needs_draft_model(words: str) -> bool:
    """Whether a participant drafts with a model that its words do not name."""
    name, *options = _split(words)
    if name.startswith(SCHEMES) or name in OTHERS:
        return name == ASSISTED or (name == DRAFT and not _names("--draft-model", options))
    return not _names("--draft-model", options) and (
        _method_of(name).drafter_class.drafts_with() == "draft_model"
    )


def _names(option: str, options: Sequence[str]) -> bool:
    spelled = [word.partition("=")[0].replace("_", "-") for word in options]
    return option in spelled
