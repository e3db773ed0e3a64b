"""OpenVINO GenAI and CTranslate2 answer the same prompts in turn with methods; stand-ins take their places.

Where the packages are installed, they themselves answer in the last test.

Run: pytest tests/evaluation/inference/engines/test_engines.py
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from evaluation import compare
from evaluation.answers.answer_file import read_lines
from evaluation.answers.defects import find_defects
from evaluation.inference.command import participant_of
from evaluation.inference.engines import participant
from evaluation.inference.engines.participant import ENGINES, EngineConfig
from evaluation.reporting.notes import alarms, group_notes
from evaluation.scoring.comparable import group_answers, load_answers
from evaluation.scoring.intervals import SpeedVerdict
from model.commands.command_line import UserError
from tests.evaluation.conftest import read_meta, read_rows
from tests.evaluation.inference.engines.stand_in import InThisProcess
from tests.model.api.loading.tiny_gguf import tiny_llama, tokens, write_gguf

NEW = 8
FEW = ["--threads", "1", "--max-new-tokens", str(NEW), "--question-end", "2", "--warmup", "1"]


def decoded(prompt: list[int], count: int, ends: list[int]) -> list[int]:
    """Return the greedy tokens of the model that the file was made of."""
    words: Any = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    ids = tiny_llama().generate(torch.tensor([prompt]), eos_token_id=ends or None, **words)
    found: list[int] = ids[0, len(prompt) :].tolist()
    return found


class Pipeline:
    """In place of `openvino_genai.LLMPipeline`; with prompt lookup every second pass has a draft of one token."""

    made: list[Pipeline]

    def __init__(self, model: str, device: str, **settings: Any) -> None:
        self.model, self.device, self.settings = model, device, settings
        self.made.append(self)

    def generate(self, inputs: tuple[np.ndarray, np.ndarray], config: Any) -> SimpleNamespace:
        ids, mask = inputs
        assert ids.dtype == mask.dtype == np.int64 and mask.all()
        assert not self.settings["scheduler_config"].enable_prefix_caching
        ends = sorted(config.stop_token_ids)
        found = decoded(ids[0].tolist(), config.max_new_tokens, ends)
        rows = [2] * (len(found) // 2) if self.settings.get("prompt_lookup") else [1] * len(found)
        metrics = SimpleNamespace(
            get_ttft=lambda: SimpleNamespace(mean=2.0),
            get_generate_duration=lambda: SimpleNamespace(mean=5.0),
            raw_metrics=SimpleNamespace(m_batch_sizes=rows),
        )
        return SimpleNamespace(tokens=[found], perf_metrics=metrics)


class Core:
    """In place of `openvino.Core`: of a processor without units for bfloat16."""

    def set_property(self, device: str, settings: dict[str, str]) -> None:
        assert device == "CPU" and settings["INFERENCE_PRECISION_HINT"] in ("f32", "bf16")

    def get_property(self, device: str, name: str) -> Any:
        types = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "u8"}
        if name in types:
            return SimpleNamespace(get_type_name=lambda: types[name])
        return ["FP32", "INT8"]


class Generator:
    """In place of `ctranslate2.Generator`."""

    compute_type = "float32"

    def __init__(self, model: str, **settings: Any) -> None:
        assert settings == {"device": "cpu", "inter_threads": 1, "intra_threads": 1}

    def generate_batch(self, prompts: list[list[str]], **given: Any) -> list[SimpleNamespace]:
        (prompt,) = prompts
        assert given["return_end_token"] and not given["include_prompt_in_result"]
        ids = [tokens().index(token) for token in prompt]
        found = decoded(ids, given["max_length"], given["end_token"])
        assert not any(given["callback"](token) for token in found)
        return [SimpleNamespace(sequences_ids=[found])]


@pytest.fixture
def pipelines(monkeypatch: pytest.MonkeyPatch) -> list[Pipeline]:
    """The pipelines that are made by modules in place of the packages."""
    genai: Any = ModuleType("openvino_genai")
    genai.__version__, genai.LLMPipeline = "2026.4", Pipeline
    genai.SchedulerConfig = lambda: SimpleNamespace(enable_prefix_caching=True)
    genai.TokenizedInputs = lambda ids, mask: (ids, mask)

    def config(**given: Any) -> SimpleNamespace:
        return SimpleNamespace(set_eos_token_id=lambda _: None, stop_token_ids=set(), **given)

    genai.GenerationConfig = config
    openvino: Any = ModuleType("openvino")
    openvino.Core, openvino.Tensor = Core, lambda array: array
    ctranslate2: Any = ModuleType("ctranslate2")
    ctranslate2.__version__, ctranslate2.Generator = "4.8", Generator
    ctranslate2.get_supported_compute_types = lambda _: {"int8", "float32"}
    for module in (genai, openvino, ctranslate2):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(participant, "find_spec", lambda _: object())
    monkeypatch.setattr(participant, "EngineProcess", InThisProcess)
    Pipeline.made = []
    return Pipeline.made


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as a GGUF file."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama())


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """A folder as CTranslate2's converter writes it."""
    folder = tmp_path / "converted"
    folder.mkdir()
    (folder / "model.bin").touch()
    (folder / "vocabulary.json").write_text(json.dumps(tokens()))
    return folder


def test_engines_answer_the_same_prompts_into_ordinary_files(
    file: Path, converted: Path, tmp_path: Path, pipelines: list[Pipeline]
) -> None:
    names = ["vanilla", "openvino", "openvino-pld", f"ctranslate2 --model {converted}"]
    words = ["--model-path", str(file), *FEW, "--out", str(tmp_path / "answers")]
    assert compare.main(["--methods", *names, *words]) == 0
    paths = {read_meta(path)["method"]: path for path in (tmp_path / "answers").glob("*.jsonl")}
    assert not [flaw for path in paths.values() for flaw in find_defects("x", read_lines(path))]
    base = read_rows(paths["vanilla"])
    for name, num_steps in (("openvino", NEW), ("openvino-pld", NEW // 2), ("ctranslate2", NEW)):
        meta = read_meta(paths[name])
        assert (meta["is_served"], meta["dtype"], meta["threads"]) == (True, None, 1)
        for mine, row in zip(base, read_rows(paths[name]), strict=True):
            (choice,), (expected,) = row["choices"], mine["choices"]
            for key in ("turns", "token_ids", "new_tokens", "prompt_tokens", "stop_reasons"):
                assert choice[key] == expected[key], key
            assert set(choice["decoding_steps"]) == {num_steps}
            assert set(choice["draft_tokens"]) == {num_steps if num_steps < NEW else 0}
            if name != "ctranslate2":
                assert choice["prefill_time"][0] == 0.002 and choice["decode_time"][0] == 0.003
    said = {name: read_meta(path).get("engine") for name, path in paths.items()}
    expected = {"program": "openvino-genai 2026.4", "precision": "f32 with a KV cache of u8"}
    assert said["openvino"] == expected | {"features": "FP32 INT8", "lacks": ""}
    assert said["ctranslate2"]["features"] == "float32 int8" and said["vanilla"] is None
    plain, lookup = pipelines
    assert (plain.model, plain.device) == (str(file), "CPU")
    assert "prompt_lookup" not in plain.settings and lookup.settings["prompt_lookup"]
    assert plain.settings["INFERENCE_NUM_THREADS"] == 1
    group = group_answers([load_answers(path) for path in paths.values()])[0]
    assert "CTranslate2: ctranslate2 4.8; float32; float32 int8" in group_notes(group, None)


def test_a_build_without_the_machine_s_instruction_sets_has_no_verdict(
    file: Path, tmp_path: Path, pipelines: list[Pipeline]
) -> None:
    """Nor is anything called faster than it."""
    words = ["--model-path", str(file), *FEW, "--out", str(tmp_path)]
    assert compare.main(["--methods", "vanilla", "openvino", *words]) == 0
    (path,) = (one for one in tmp_path.glob("*.meta.json") if "openvino" in one.name)
    meta = json.loads(path.read_text())
    meta["engine"]["lacks"] = "AVX512 AVX512_BF16"
    path.write_text(json.dumps(meta))
    files = [load_answers(one) for one in sorted(tmp_path.glob("*.jsonl"))]
    (group,) = group_answers(files)
    (row,) = (one for one in group.rows if one.entry.method == "openvino")
    assert group.verdict(row) is SpeedVerdict.UNEQUAL
    assert [line for line in alarms([group]) if "was built without AVX512 AVX512_BF16" in line]
    (group,) = group_answers(files, base="openvino")
    (row,) = (one for one in group.rows if one.entry.method == "vanilla")
    assert group.verdict(row) is SpeedVerdict.UNEQUAL


def test_the_sets_that_llama_cpp_lacks_are_those_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sets = ["avx", "avx2", "avx512f", "avx512_bf16", "amx_bf16"]
    monkeypatch.setattr(participant, "instruction_sets", lambda: sets)
    engine: Any = ENGINES["llama.cpp"]
    assert engine.lacking("AVX AVX2 FMA") == "AVX512 AVX512_BF16"
    assert engine.lacking("AVX2 AVX512 AVX512_BF16") == ""
    assert ENGINES["openvino"].lacking("FP32") == ""  # type: ignore[attr-defined]


def test_options_follow_the_name_of_an_engine() -> None:
    found = participant_of("llama.cpp-ngram --ngram 3 --draft 8 --speculation ngram_simple")
    assert found.config == EngineConfig(speculation="ngram_simple", ngram=3, draft=8)
    assert participant_of("ctranslate2 --model x").config == EngineConfig("x")
    assert participant_of("openvino-pld --draft 10").config == EngineConfig(ngram=3, draft=10)
    assert participant_of("llama.cpp-draft --draft-model x").config == EngineConfig(draft_model="x")
    assert participant_of("llama.cpp-draft", "y").config == EngineConfig(draft_model="y")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("llama.cpp --draft 3", "llama.cpp takes no options"),
        ("openvino --ngram 3", "unrecognized arguments: --ngram 3"),
        ("llama.cpp-ngram --speculation sps", "invalid choice: 'sps'"),
        ("llama.cpp-ngram --draft 0", "draft: got 0; allowed: 1 or more"),
    ],
)
def test_options_of_another_engine_are_refused(
    words: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((UserError, SystemExit)) as error:
        participant_of(words)
    assert named in f"{error.value} {capsys.readouterr().err}"


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("openvino", "model: got data/demo/model with openvino; allowed: a GGUF file, or a folder"),
        ("ctranslate2", "allowed: a folder that ct2-transformers-converter wrote"),
    ],
)
def test_models_that_an_engine_does_not_read_are_refused_before_the_weights_load(
    pipelines: list[Pipeline], words: str, named: str
) -> None:
    with pytest.raises(UserError) as error:
        compare.main(["--methods", "vanilla", words, "--model-path", "data/demo/model"])
    assert named in str(error.value) and not pipelines


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("name", ["openvino", "openvino-pld", "ctranslate2"])
def test_without_its_package_an_engine_is_refused_in_one_line(
    name: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(participant, "find_spec", lambda _: None)
    package = ENGINES[name].package  # type: ignore[attr-defined]
    with pytest.raises(
        UserError, match=f"got {name}, which needs {package}; pip install {package}$"
    ):
        compare.main(["--methods", "vanilla", name, "--model-path", str(file)])


@pytest.mark.skipif(not find_spec("ctranslate2"), reason="ctranslate2 is not installed")
def test_ctranslate2_itself_has_our_tokens(tmp_path: Path) -> None:
    from ctranslate2.converters import TransformersConverter

    model, folder = "data/demo/model", str(tmp_path / "converted")
    TransformersConverter(model).convert(folder, quantization="float32")
    words = ["--model-path", model, "--dtype", "float32", *FEW, "--out", str(tmp_path / "answers")]
    assert compare.main(["--methods", "vanilla", f"ctranslate2 --model {folder}", *words]) == 0
    answers = [
        [choice["token_ids"] for row in read_rows(path) for choice in row["choices"]]
        for path in sorted((tmp_path / "answers").glob("*.jsonl"))
    ]
    assert len(answers) == 3 and answers[0] == answers[1] == answers[2]


@pytest.mark.skipif(not find_spec("openvino_genai"), reason="openvino-genai is not installed")
@pytest.mark.parametrize("name", ["openvino", "openvino-pld"])
def test_openvino_itself_has_our_tokens(name: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), kind="F16")
    words = ["--model-path", str(file), "--dtype", "float32", *FEW, "--out", str(tmp_path / "out")]
    assert compare.main(["--methods", "vanilla", name, *words]) == 0
    answers = [
        [choice["token_ids"] for row in read_rows(path) for choice in row["choices"]]
        for path in sorted((tmp_path / "out").glob("*.jsonl"))
    ]
    assert len(answers) == 3 and answers[0] == answers[1] == answers[2]
