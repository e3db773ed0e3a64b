"""The shared command line: options are the fields of two dataclasses, under Spec-Bench's names."""

from __future__ import annotations

import argparse
import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from evaluation.answering import command as cli
from evaluation.answering.command import build_parser, parse
from evaluation.answering.config import PARTS, RunConfig
from model.methods.registry import METHODS, drafter_class, find_method
from tests.evaluation.conftest import ROOT

# The options of Spec-Bench's and TokenRecycling's own scripts.
SPEC_BENCH = """--model-path --model-id --bench-name --question-begin --question-end --answer-file
    --max-new-tokens --num-choices --num-gpus-per-model --num-gpus-total --temperature --dtype"""
METHOD_OPTIONS = {
    "vanilla": "",
    "recycling": "--output-id-topk --tree-version",
    "pld": "--max-ngram-size --num-pred-tokens",
    "lookahead": "--level --window --guess",
    "samd": "--fallback --threshold --bias --output-id-topk --tree-version",
    "sps": "--draft-model --num-draft-tokens",
    "hybrid": "--num-nodes --budget --output-id-topk",
}
CHANGED: dict[str, Any] = dict(
    model_path="org/name",
    model_id="a_b",
    bench_name="mbpp",
    question_file="q.jsonl",
    question_begin=3,
    question_end=9,
    shuffle=5,
    answer_file="a.jsonl",
    resume=True,
    max_new_tokens=7,
    num_choices=2,
    temperature=0.5,
    top_k=5,
    top_p=0.25,
    seed=11,
    dtype="float64",
    device="cuda:1",
    threads=2,
    num_gpus_per_model=2,
    num_gpus_total=4,
    ray_address="auto",
    state_order="single",
    shard="2/3",
    trust_remote_code=True,
    allow_pickle=True,
    conv_template="raw",
    warmup=0,
)
CHANGED_RUN = RunConfig.of(CHANGED)
# Fields that exclude others, and a run in which each has another value than its default.
EXCLUDING = {
    "overwrite": RunConfig.of({"overwrite": True}),
    "num_workers": RunConfig.of({"num_workers": 3}),
    "compile": RunConfig.of({"compile": True}),
}


def changed_configs(method: str, folder: Path) -> list[Any]:
    """Return configs of a method that together differ from the defaults in every field."""
    tree = folder / "a_tree.json"
    tree.write_text(json.dumps([[0], [1], [0, 1]]))
    values: dict[str, list[dict[str, Any]]] = {
        "vanilla": [{}],
        "recycling": [
            {"output_id_topk": 3, "tree_version": str(tree), "start": "cold"},
            {"policy": "original"},
            {"harvest_prompt": True},
            {"harvest_prompt": False},
        ],
        "pld": [{"max_ngram_size": 4, "num_pred_tokens": 12, "match": "latest", "budget": "auto"}],
        "lookahead": [{"level": 4, "window": 8, "guess": 9, "budget": "auto"}],
        "hybrid": [
            {"num_nodes": 9, "budget": "fixed", "output_id_topk": 5, "start": "cold"},
            {"table_bits": 12, "harvest_prompt": False, "neighbours": 9},
        ],
        "samd": [
            {"fallback": "none", "match": "first", "num_pred_tokens": 9, "tokens_per_match": 2},
            {"budget": "auto"},
            {"threshold": 3, "automaton": "corpus.safetensors", "bias": 2},
            {"output_id_topk": 3, "tree_version": str(tree), "start": "cold"},
        ],
        "sps": [
            {
                "draft_model": "org/name",
                "num_draft_tokens": 3,
                "draft_dtype": "bfloat16",
                "budget": "auto",
            }
        ],
    }
    return [drafter_class(method).config_class(**given) for given in values[method]]


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
    assert not untested, f"give these fields of {method} another value here: {untested}"


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
    missing = {*SPEC_BENCH.split(), *METHOD_OPTIONS[method].split()} - set(known)
    assert not missing, f"options of Spec-Bench that {method} lacks: {missing}"


@pytest.mark.parametrize("method", METHODS)
def test_help_names_every_option_and_shows_examples(method: str) -> None:
    text = build_parser(find_method(method)).format_help()
    for action in build_parser(find_method(method))._actions:
        assert action.option_strings[0] in text
        assert action.help, f"{action.option_strings} has no help text"
    assert f"python -m evaluation.inference_{method} --max-new-tokens" in text
    assert "scripts.download_data spec_bench" in text
    needs_model = "draft_model" in {
        item.name for item in dataclasses.fields(drafter_class(method).config_class)
    }
    assert text.count("--draft-model data/demo/draft") == needs_model, "the example should run"
    assert str(ROOT) not in text, "help should not show this machine's folders"


def test_only_methods_with_memory_have_matrix_options() -> None:
    having = {
        name for name in METHODS if "--load-matrix" in build_parser(find_method(name)).format_help()
    }
    assert having == {name for name in METHODS if drafter_class(name).keeps_memory()}
    assert {"recycling", "samd"} <= having < set(METHODS)
    matrix = parse(find_method("recycling"), ["--load_matrix", "a", "--save-matrix", "b"])[2]
    assert (matrix.load, matrix.save) == ("a", "b")


@pytest.mark.parametrize(
    ("command", "method"), [*((name, name) for name in METHODS), ("baseline", "vanilla")]
)
def test_each_command_runs_its_method(
    command: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    monkeypatch.setattr(cli, "inference_command", called.append)
    runpy.run_module(f"evaluation.inference_{command}", run_name="__main__")
    assert called == [method]
