"""The benchmark: figures of hand-made answers, and the command on two questions of the demo model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config

from evaluation.answering.entrants import entrant_of
from evaluation.answers.row import Turn
from evaluation.answers.step_figures import PARTS
from evaluation.questions.questions import DATA_FOLDER, Question
from model.commands.command_line import UserError
from model.commands.model_options import SamplingOptions
from model.engine.target import TargetModel
from scripts.benchmark import command
from scripts.benchmark.command import main, measure, spread
from scripts.benchmark.device_costs import CostPoint, Roofline, choose_contexts, cost_curve
from scripts.benchmark.methods import Method, ready
from scripts.benchmark.report import Work, print_tables, speedup, summarise
from tests.model.decoded import known


def answer(num_tokens: int, total: float, decode: float | None = None) -> Turn:
    """Return an answer of equal steps."""
    details = {"step_times": dict.fromkeys(PARTS, 1.0), "draft_tokens": num_tokens}
    if decode is not None:
        details["decode_time"] = decode
    return Turn([7] * num_tokens, [2] * (num_tokens // 2), total, details)


def test_a_method_that_takes_half_the_time_is_twice_as_fast_whatever_the_questions() -> None:
    seconds = np.array([1.0, 3.0, 0.5])
    tokens = np.array([10.0, 20.0, 5.0])
    ratio, low, high = speedup(Work(tokens, seconds / 2), Work(tokens, seconds))
    assert (ratio, low, high) == pytest.approx((2, 2, 2))


def test_intervals_hold_the_ratio_and_widen_with_uneven_questions() -> None:
    tokens = np.full(8, 10.0)
    uneven = np.array([1, 1, 1, 1, 4, 4, 4, 4.0])
    ratio, low, high = speedup(Work(tokens, np.ones(8)), Work(tokens, uneven))
    assert low < ratio < high
    assert high - low > 0.5


def test_a_summary_weighs_tokens_and_seconds_over_repetitions() -> None:
    answers = {
        "vanilla": [[answer(4, 2.0, 1.0), answer(4, 2.0, 1.0)]] * 2,
        "pld": [[answer(4, 1.0, 0.5), answer(4, 3.0, 0.5)]] * 2,
        "generate": [[answer(4, 4.0), answer(4, 4.0)]] * 2,
    }
    rows = {row["method"]: row for row in summarise(answers, ["qa", "math"])}
    assert rows["pld"]["tokens_per_second"] == pytest.approx(2)
    assert rows["pld"]["speedup"][0] == pytest.approx(1)
    assert rows["pld"]["decode_speedup"][0] == pytest.approx(2)
    assert rows["pld"]["speedup_over_generate"][0] == pytest.approx(2)
    assert rows["pld"]["speedup_by_task"] == pytest.approx({"qa": 4, "math": 4 / 3})
    assert rows["pld"]["mean_accepted_tokens"] == 2
    assert sum(rows["pld"]["share_of_step"].values()) == pytest.approx(1)
    assert "decode_speedup" not in rows["generate"], "a referee's prefill is not told apart"


def test_different_tokens_are_counted() -> None:
    answers = {"vanilla": [[answer(4, 1.0, 1.0)]], "pld": [[answer(6, 1.0, 1.0)]]}
    assert [row["differing_answers"] for row in summarise(answers, ["qa"])] == [0, 1]
    later = {
        "vanilla": [[answer(4, 1.0, 1.0)] * 2] * 3,
        "pld": [[answer(4, 1.0, 1.0)] * 2, *[[answer(6, 1.0, 1.0), answer(4, 1.0, 1.0)]] * 2],
    }
    assert [row["differing_answers"] for row in summarise(later, ["qa", "qa"])] == [0, 1]


def test_the_table_by_task_names_what_its_ratios_are_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours, theirs = [[answer(4, 1.0, 1.0)]], [[answer(4, 2.0)]]
    for referees, name in (
        ({}, "vanilla"),
        ({"generate-pld": theirs}, "generate-pld"),
        ({"generate-pld": theirs, "generate": theirs}, "generate"),
    ):
        rows = summarise({"vanilla": ours, **referees}, ["qa"])
        curve = [CostPoint(1, 16, 1.0), CostPoint(2, 16, 1.5), CostPoint(1, 32, 1.0)]
        print_tables(rows, curve, Roofline(1.0, 1, 1.0, 1.0))
        lines = capsys.readouterr().out.splitlines()
        assert f"end to end / {name}, by task" in lines
        assert "| 2     | 1.50 (1.50) |           - |" in lines, "no room for two nodes there"


@pytest.mark.parametrize(
    "words", ["--num-questions 0", "--num-questions -3", "--repetitions 0", "--contexts 16 0"]
)
def test_numbers_that_measure_nothing_are_refused(words: str) -> None:
    with pytest.raises(UserError, match=r"got (0|-3); allowed: 1 or more"):
        main(words.split())


def test_questions_are_spread_over_the_file() -> None:
    questions = [Question(index, "qa", ("?",)) for index in range(100)]
    assert [question.question_id for question in spread(questions, 3)] == [0, 50, 99]
    assert spread(questions, 200) == questions


@pytest.mark.parametrize("methods", [["vanilla", "nope"], ["pld"]])
def test_unknown_methods_and_a_missing_baseline_are_refused(methods: list[str]) -> None:
    with pytest.raises(UserError, match="methods"):
        main(["--methods", *methods])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--methods vanilla pld vanilla", "methods: got vanilla pld vanilla; allowed: each once"),
        ("--random-prompts --bench-name demo", "random_prompts: got questions too"),
        ("--random-prompts --question-file x", "random_prompts: got questions too"),
        ("--out no/folder/x.json", "out: got no/folder/x.json; allowed: a file in a folder"),
        ("--out data/demo/question.jsonl", "question.jsonl is one of the files to read"),
        ("--contexts 16 3071", "contexts: got 3071; allowed: 1 to 3070 with this model"),
    ],
)
def test_options_without_an_effect_are_refused(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(words.split())


def test_models_that_verify_chains_alone_have_a_cost_curve() -> None:
    curve = cost_curve(TargetModel(known("BLOOM").build()), [1, 5], [16])
    assert [(point.num_nodes, point.context) for point in curve] == [(1, 16), (5, 16)]
    target = TargetModel(known("GPT-Neo").build())
    (longest,) = choose_contexts([510], target.config)
    curve = cost_curve(target, [1, 2, 3], [16, longest])
    found = [(point.num_nodes, point.context) for point in curve]
    assert found == [(1, 16), (2, 16), (3, 16), (1, 510), (2, 510)], "a chain ends in the context"


def test_a_model_that_cannot_be_enlarged_is_refused_before_the_weights_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("scripts.benchmark.command.load_target")
    shutil.copytree(DATA_FOLDER / "demo" / "model", tmp_path / "model")
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 8192}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="model type: got gpt2; allowed: llama"):
        main(["--model-path", str(tmp_path / "model"), "--shape", "150m"])


def test_the_cost_curve_ends_where_the_models_context_does() -> None:
    assert choose_contexts(None, LlamaConfig(max_position_embeddings=1024)) == [128, 512, 1022]
    assert choose_contexts(None, LlamaConfig(max_position_embeddings=300)) == [128, 298]
    longrope = Phi3Config(
        max_position_embeddings=4096,
        original_max_position_embeddings=64,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    )
    assert choose_contexts([100], longrope) == [100]
    assert choose_contexts([5], LlamaConfig(max_position_embeddings=300)) == [5]


def test_the_command_prints_tables_and_a_line_of_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--num-questions", "2", "--repetitions", "1", "--max-new-tokens", "8"]
    options += [
        "--threads",
        "1",
        "--contexts",
        "16",
        "--methods",
        "vanilla",
        "recycling",
        "generate",
    ]
    assert main([*options, "--out", str(tmp_path / "report.json")]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    report = json.loads(lines[-1])
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert [row["method"] for row in report["methods"]] == ["vanilla", "recycling", "generate"]
    assert all(row["differing_answers"] == 0 for row in report["methods"])
    assert report["roofline"]["bandwidth"] > 0
    assert any(line.startswith("| recycling") for line in lines)


def test_threads_are_chosen_unless_they_are_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "use_fastest_threads", lambda target: "1 thread is fastest")
    options = ["--num-questions", "1", "--repetitions", "1", "--max-new-tokens", "4"]
    assert main([*options, "--contexts", "16", "--methods", "vanilla", "pld"]) == 0
    assert "1 thread is fastest; --threads sets it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--methods", "vanilla", "sps", "--model-path", "elsewhere"],
            "draft_model: got none.* sps",
        ),
        (["--methods", "vanilla", "pld", "--draft-model", "mine"], "draft_model: got mine"),
        (
            ["--methods", "vanilla", "sps", "--draft-model", "./mine"],
            "got './mine'; allowed: a folder",
        ),
        (
            ["--methods", "vanilla", "generate-assisted", "--draft-model", "./mine"],
            "got './mine'; allowed: a folder",
        ),
        (
            ["--methods", "vanilla", "medusa --heads ./mine"],
            "heads: got 'mine'; allowed: a folder",
        ),
        (
            ["--methods", "vanilla", "medusa", "--model-path", "elsewhere"],
            "heads: got none; name the folder of medusa's heads",
        ),
    ],
)
def test_a_draft_model_is_given_where_one_is_wanted(options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(options)


def test_a_draft_model_drafts_for_sps_and_for_assisted_generation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    methods = ["vanilla", "sps", "generate-assisted"]
    options = ["--num-questions", "2", "--repetitions", "1", "--max-new-tokens", "16"]
    assert main([*options, "--threads", "1", "--contexts", "16", "--methods", *methods]) == 0
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    rows = {row["method"]: row for row in report["methods"]}
    assert list(rows) == methods
    assert all(row["differing_answers"] == 0 for row in rows.values())
    assert rows["sps"]["mean_accepted_tokens"] > 1
    assert rows["sps"]["speedup_over_generate_assisted"][0] > 0


@pytest.mark.parametrize("name", ["generate", "generate-pld"])
def test_a_referee_ends_with_the_models_context_as_our_methods_do(name: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32},
        **{"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32},
    )
    target = TargetModel(LlamaForCausalLM(config).eval())
    prompt = list(range(1, 29))
    sampling = SamplingOptions(max_new_tokens=16)
    ours, theirs = (
        ready(entrant_of(words), target, sampling, frozenset()).answer(prompt).token_ids
        for words in ("vanilla", name)
    )
    assert len(ours) == 4
    assert theirs == ours


def test_a_method_that_drafts_from_its_own_earlier_answer_is_not_measured_so() -> None:
    resets: list[int] = []
    calls: list[int] = []

    def respond(prompt: list[int]) -> Turn:
        calls.append(prompt[0])
        return answer(1, 1.0, 1.0)

    method = Method(respond, lambda: resets.append(len(calls)))
    measure({"vanilla": method}, [[1], [2]], num_repetitions=2)
    assert calls == [1, 1, 2, 1, 2], "one unmeasured answer, then every prompt in both repetitions"
    assert resets == [1, 3], "memory is cleared before each repetition"


@pytest.mark.parametrize("name", ["nope", "vanilla-auto", "hybrid-auto"])
def test_an_unknown_method_or_one_without_an_automatic_budget_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="recycling-auto"):
        entrant_of(name)
