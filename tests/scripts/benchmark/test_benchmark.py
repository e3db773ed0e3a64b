"""The benchmark of costs: what is refused, where the curve ends, and the command on the demo model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import LlamaConfig, Phi3Config

from evaluation.questions.questions import DATA_FOLDER
from model.commands.command_line import UserError
from model.engine.target import TargetModel
from scripts.benchmark import command
from scripts.benchmark.command import main
from scripts.benchmark.device_costs import (
    CostPoint,
    Roofline,
    choose_contexts,
    cost_curve,
    print_costs,
)
from tests.model.decoded import known


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--out no/folder/x.json", "out: got no/folder/x.json; allowed: a file in an existing"),
        ("--contexts 16 0", "contexts: got 0; allowed: 1 or more"),
        ("--contexts 16 3071", "contexts: got 3071; allowed: 1 to 3070 with this model"),
        ("--nodes -1", "nodes: got -1"),
        ("--threads 0", "threads: got 0"),
    ],
)
def test_options_that_measure_nothing_are_refused(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        main(words.split())
    assert "\n" not in str(error.value)


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
    words = ["--threads", "1", "--contexts", "16", "--out", str(tmp_path / "report.json")]
    assert main(words) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    report = json.loads(lines[-1])
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert [point["num_nodes"] for point in report["cost_curve"]] == list(command.NODES)
    assert report["roofline"]["bandwidth"] > 0
    assert any(line.startswith("| 81 ") for line in lines)


def test_a_table_shows_where_there_is_no_room(capsys: pytest.CaptureFixture[str]) -> None:
    curve = [CostPoint(1, 16, 1.0), CostPoint(2, 16, 1.5), CostPoint(1, 32, 1.0)]
    print_costs(curve, Roofline(1.0, 1, 1.0, 1.0))
    lines = capsys.readouterr().out.splitlines()
    assert "| 2     | 1.50 (1.50) |           - |" in lines, "no room for two nodes there"


def test_threads_are_chosen_unless_they_are_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "use_fastest_threads", lambda target: "1 thread is fastest")
    monkeypatch.setattr(command, "NODES", (1,))
    assert main(["--contexts", "16"]) == 0
    assert "1 thread is fastest; --threads sets it" in capsys.readouterr().err
