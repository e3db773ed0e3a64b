"""The shared command line: options are the fields of two dataclasses, under Spec-Bench's names."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from evaluation.inference import __main__ as inference
from evaluation.inference import command as cli
from evaluation.inference.command import build_parser, parse
from evaluation.inference.config import PARTS, RunConfig
from model.commands.command_line import UserError
from model.methods import METHODS, drafter_class, find_method
from tests.evaluation.conftest import ROOT

# The options of Spec-Bench's and TokenRecycling's own scripts.
SPEC_BENCH = """--model-path --model-id --bench-name --question-begin --question-end --answer-file
    --max-new-tokens --num-choices --num-gpus-per-model --num-gpus-total --temperature --dtype"""
METHOD_OPTIONS = {
    "recycling": "--output-id-topk --tree-version",
    "pld": "--max-ngram-size --num-pred-tokens",
    "lookahead": "--level --window --guess",
    "samd": "--fallback --threshold --bias --output-id-topk --tree-version",
    "rest": "--datastore --num-nodes --max-token-span",
    "sps": "--draft-model --num-draft-tokens",
    "medusa": "--heads --num-nodes",
    "hydra": "--heads --num-nodes",
}
# Options of methods that are refused without another.
NEEDS = {
    ("samd", "bias"): {"automaton": "corpus.safetensors"},
    ("recycling", "start"): {"policy": "average"},
    ("recycling", "harvest_prompt"): {"policy": "average"},
}
CHANGED: dict[str, Any] = dict(
    model_path="org/name",
    model_id="a_b",
    bench_name="mbpp",
    question_file="q.jsonl",
    question_begin=3,
    num_questions=5,
    prompt_tokens="5:9",
    question_end=9,
    shuffle=5,
    answer_file="a.jsonl",
    resume=True,
    max_new_tokens=7,
    num_choices=2,
    temperature=0.5,
    top_k=5,
    top_p=0.25,
    min_p=0.1,
    repetition_penalty=1.25,
    stop=("STOP", "a b"),
    system_prompt="Be brief.",
    seed=11,
    dtype="float64",
    device="cuda:1",
    threads=2,
    graphs="off",
    kernels="off",
    weights="dequantised",
    num_gpus_per_model=2,
    num_gpus_total=4,
    ray_address="auto",
    state_order="single",
    shard="2/3",
    trust_remote_code=True,
    allow_pickle=True,
    conv_template="raw",
    category_map=("math=math_reasoning",),
    warmup=0,
)
CHANGED_RUN = RunConfig.of(CHANGED)
# Fields that exclude others, and a run in which each has another value than its default.
EXCLUDING = {
    "overwrite": RunConfig.of({"overwrite": True}),
    "num_workers": RunConfig.of({"num_workers": 3}),
    "batch_size": RunConfig.of({"batch_size": 3}),
    "prefix_cache": RunConfig.of({"prefix_cache": True}),
}


def changed_values(item: dataclasses.Field[Any], folder: Path) -> list[Any]:
    """Return values of an option that are not its default, of every kind that it takes."""
    kind = getattr(
        item.type, "__name__", str(item.type)
    )  # of a module with evaluated annotations too
    if item.metadata["choices"]:
        values = list(item.metadata["choices"])
    elif kind.startswith("bool"):
        values = [True, False]
    elif kind.startswith("int"):
        default = 9 if item.default is None else item.default
        values = [default - 1 if default == item.metadata["most"] else default + 1]
    elif kind.startswith("float"):
        values = [item.default + 0.5]
    else:
        values = [str(folder / "a_tree.json")]
    return [value for value in values if value != item.default]


def changed_configs(method: str, folder: Path) -> list[Any]:
    """Return configs of a method: each field alone with other values than its default, and as many
    fields at once as go together.
    """
    (folder / "a_tree.json").write_text(json.dumps([[0], [1], [0, 1]]))
    config_class = drafter_class(method).config_class
    configs, together = [], config_class()
    for item in dataclasses.fields(config_class):
        for value in changed_values(item, folder):
            needs = NEEDS.get((method, item.name), {})
            configs.append(config_class(**needs, **{item.name: value}))
        with contextlib.suppress(ValueError):
            together = dataclasses.replace(together, **{item.name: value})
    return [*configs, together]


def to_argv(config: Any) -> list[str]:
    """Spell the fields of a config that differ from their defaults as options."""
    if isinstance(config, RunConfig):
        return [word for part in PARTS for word in to_argv(getattr(config, part))]
    argv = []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        flag = "--" + item.name.replace("_", "-")
        if value == item.default:
            continue
        if isinstance(value, bool):
            argv.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            argv += [flag, *value]
        else:
            argv += [flag, str(value)]
    return argv


@pytest.mark.parametrize("method", METHODS)
def test_every_field_has_an_option_and_round_trips(method: str, tmp_path: Path) -> None:
    configs = changed_configs(method, tmp_path)
    for config in configs:
        run, parsed, _ = parse(find_method(method), [*to_argv(CHANGED_RUN), *to_argv(config)])
        assert run == CHANGED_RUN
        assert parsed == config
    untested = {
        item.name
        for item in dataclasses.fields(configs[0])
        if all(getattr(config, item.name) == item.default for config in configs)
    }
    assert not untested, f"these fields of {method} keep their defaults above: {untested}"


def test_every_field_of_a_run_is_round_tripped_above() -> None:
    changed, defaults = CHANGED_RUN.options(), RunConfig().options()
    same = {name for name, value in changed.items() if value == defaults[name]}
    assert same == set(EXCLUDING), "only what excludes another option may be left out above"
    for name, run in EXCLUDING.items():
        assert run.options()[name] != defaults[name]
        assert parse(find_method("vanilla"), to_argv(run))[0] == run


@pytest.mark.parametrize("method", METHODS)
def test_defaults_are_those_of_the_dataclasses(method: str) -> None:
    assert parse(find_method(method), [])[:2] == (RunConfig(), drafter_class(method).config_class())
    for action in build_parser(find_method(method))._actions:
        is_ours = action.default in (argparse.SUPPRESS, None)
        assert is_ours, f"{action.option_strings} has a second default {action.default!r}"


@pytest.mark.parametrize("method", METHODS)
def test_underscores_are_dashes_in_names_and_stay_in_values(method: str) -> None:
    dashes = [*to_argv(CHANGED_RUN), "--model-id=c_d"]
    underscores = [
        "--" + word[2:].replace("-", "_") if word.startswith("--") else word for word in dashes
    ]
    assert underscores != dashes
    assert parse(find_method(method), underscores) == parse(find_method(method), dashes)
    assert parse(find_method(method), underscores)[0].answers.model_id == "c_d"


def test_the_options_of_recycling_take_underscores_as_in_its_own_script() -> None:
    _, config, _ = parse(
        find_method("recycling"), ["--tree_version", "2.2.2", "--output_id_topk=9"]
    )
    assert config.output_id_topk == 9
    assert parse(find_method("recycling"), ["--no_harvest_prompt"])[1].harvest_prompt is False


def test_max_new_token_is_max_new_tokens() -> None:
    assert parse(find_method("vanilla"), ["--max-new-token", "5"])[0].sampling.max_new_tokens == 5


@pytest.mark.parametrize("method", METHODS)
def test_the_option_names_of_spec_bench_are_there(method: str) -> None:
    known = build_parser(find_method(method))._option_string_actions
    assert METHOD_OPTIONS.keys() <= METHODS.keys()
    missing = {*SPEC_BENCH.split(), *METHOD_OPTIONS.get(method, "").split()} - set(known)
    assert not missing, f"options of Spec-Bench that {method} lacks: {missing}"


@pytest.mark.parametrize("method", METHODS)
def test_help_names_every_option_and_shows_examples(method: str) -> None:
    text = build_parser(find_method(method)).format_help()
    for action in build_parser(find_method(method))._actions:
        assert action.option_strings[0] in text
        assert action.help, f"{action.option_strings} has no help text"
    assert f"python -m evaluation.inference_{method.replace('-', '_')} --max-new-tokens" in text
    assert "scripts.download_data spec_bench" in text
    needs_model = "draft_model" in {
        item.name for item in dataclasses.fields(drafter_class(method).config_class)
    }
    assert text.count("--draft-model data/demo/draft") == needs_model, "the example should run"
    needs_heads = drafter_class(method).drafts_with() == "heads"
    heads = f"--heads data/demo/{find_method(method).heads_of}"
    assert text.count(heads) == needs_heads, "the example should run"
    assert str(ROOT) not in text, "help should not show this machine's folders"


def test_only_methods_with_memory_have_matrix_options() -> None:
    having = {
        name for name in METHODS if "--load-matrix" in build_parser(find_method(name)).format_help()
    }
    assert having == {name for name in METHODS if drafter_class(name).keeps_memory()}
    assert {"recycling", "samd"} <= having < set(METHODS)
    matrix = parse(find_method("recycling"), ["--load_matrix", "a", "--save-matrix", "b"])[2]
    assert (matrix.load, matrix.save) == ("a", "b")


COMMANDS = [
    file.stem.removeprefix("inference_")
    for file in sorted((ROOT / "evaluation").glob("inference_*.py"))
]


def test_spec_bench_and_token_recycling_find_their_commands() -> None:
    assert {"baseline", *METHOD_OPTIONS} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_runs_its_method(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = {"baseline": "vanilla"}.get(command, command.replace("_", "-"))
    called: list[str] = []
    monkeypatch.setattr(cli, "main", lambda name, argv: called.append(name) or 0)
    runpy.run_module(f"evaluation.inference_{command}")
    assert not called, "an import should run nothing"
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"evaluation.inference_{command}", run_name="__main__")
    assert (called, ended.value.code) == ([method], 0)


@pytest.mark.parametrize("method", METHODS)
def test_one_command_runs_every_method(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        inference.main([method, "--help"])
    assert ended.value.code == 0
    own = build_parser(find_method(method)).format_help()
    said = " ".join(capsys.readouterr().out.split())
    module = f"inference_{method.replace('-', '_')}"
    assert said == " ".join(own.replace(module, f"inference {method}").split())


def test_one_command_lists_the_methods_and_refuses_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, code in (([], 2), (["--help"], 0), (["--max-new-tokens", "3"], 2)):
        with pytest.raises(SystemExit) as ended:
            inference.main(words)
        assert ended.value.code == code
    assert f"methods: {', '.join(METHODS)}" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"method: got .pdl.; allowed: .*did you mean pld"):
        inference.main(["pdl"])
