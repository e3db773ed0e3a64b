"""Every mistake is one clear line and exit code 2, before the weights load, and spoils no answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save, save_file

from evaluation.questions.questions import DATA_FOLDER
from tests.evaluation.conftest import TOKENIZER_FILES, error_line

GOOD = {"question_id": 1, "category": "qa", "turns": ["Who?"]}
KEPT = b'{"question_id": 7, "somebody": "needs this"}'  # no line end: nothing may be cut off either


class Case(NamedTuple):
    """A mistake: its options ({} is the test's folder), what the line says, files it needs."""

    name: str
    options: str
    says: tuple[str, ...]
    files: dict[str, Any] = {}  # noqa: RUF012 (read only)
    method: str = "recycling"


def _questions(*rows: Any) -> dict[str, Any]:
    return {"q.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}


def _without(key: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != key}


def _tree(paths: Any) -> dict[str, Any]:
    return {"tree.json": json.dumps(paths)}


def _config(**values: Any) -> dict[str, Any]:
    return {"model/config.json": json.dumps(values), "model/": TOKENIZER_FILES}


def _matrix(shape: tuple[int, int], name: str = "adjacency", value: int = 0) -> dict[str, Any]:
    return {"m.safetensors": {name: torch.full(shape, value, dtype=torch.int32)}}


FILE, TREE = "--question-file {}/q.jsonl", "--tree-version {}/tree.json"
LOAD = "--policy accepted-last --load-matrix {}/"
SMALL = {"vocab_size": 64, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
MODEL = "--model-path {}/model"

CASES = (
    # model
    Case("model path is nothing", "--model-path {}/none", ("model_path", "none", "a folder")),
    Case("model path is a word", "--model-path vicuna", ("model_path", "'vicuna'", "ORG/NAME")),
    Case("model path is a file", "--model-path {}/q.jsonl", ("model_path",), _questions(GOOD)),
    Case("no config.json", MODEL, ("model_path", "config.json"), {"model/x": ""}),
    Case("config is not JSON", MODEL, ("model_path", "JSON"), {"model/config.json": "{oops"}),
    Case("config of no known type", MODEL, ("model_path", "gizmo"), _config(model_type="gizmo")),
    Case(
        "BERT",
        MODEL,
        ("model_path", "bert", "causal language model"),
        _config(model_type="bert", architectures=["BertForMaskedLM"], **SMALL),
    ),
    Case(
        "encoder-decoder",
        MODEL,
        ("model_path", "t5", "causal language model"),
        _config(model_type="t5", architectures=["T5ForConditionalGeneration"]),
    ),
    Case(
        "encoder-decoder that has a causal class",
        MODEL,
        ("model_path", "bart", "causal language model"),
        _config(
            model_type="bart",
            architectures=["BartForConditionalGeneration"],
            is_encoder_decoder=True,
        ),
    ),
    # questions
    Case("bench not fetched", "--bench-name spec_bench", ("scripts.download_data spec_bench",)),
    Case("bench unknown", "--bench-name spec-banch", ("spec-banch", "demo", "--question-file")),
    Case("bench is a path", "--bench-name ../demo", ("bench_name", "'../demo'")),
    Case("questions missing", FILE, ("q.jsonl", "No such file")),
    Case("questions are a folder", "--question-file {}", ("question file", "directory")),
    Case("questions empty", FILE, ("q.jsonl", "empty", "one JSON object a line"), {"q.jsonl": ""}),
    Case("line not JSON", FILE, ("line 2", "not JSON"), {"q.jsonl": json.dumps(GOOD) + "\n{oops"}),
    Case("line no object", FILE, ("item 1", "int", "JSON object"), _questions([1])),
    *(
        Case(f"question without {key}", FILE, ("line 2", key), _questions(GOOD, _without(key)))
        for key in GOOD
    ),
    *(
        Case(
            f"turns {turns!r}",
            FILE,
            ("line 1", "turns", "list"),
            _questions({**GOOD, "turns": turns}),
        )
        for turns in ("Who?", [], [3], None)
    ),
    Case("id of a wrong type", FILE, ("line 1", "1.5"), _questions({**GOOD, "question_id": 1.5})),
    Case("ids twice", FILE, ("line 2", "question_id 1", "twice"), _questions(GOOD, GOOD)),
    Case("not UTF-8", FILE, ("q.jsonl", "UTF-8"), {"q.jsonl": json.dumps(GOOD).encode() + b"\xff"}),
    Case("packed", FILE, ("q.jsonl", "gzip", "unpack"), {"q.jsonl": b"\x1f\x8b\x08\x00"}),
    Case("category map", "--category-map qa", ("category_map", "'qa'", "OLD=NEW")),
    Case("begin negative", "--question-begin -1", ("question_begin", "-1", "0 or more")),
    Case("begin past end", "--question-begin 4 --question-end 2", ("question_begin 4", "none")),
    Case("begin past all", "--question-begin 999", ("question_begin 999", "none of the 30")),
    # the tree and the matrix
    Case("tree unknown", "--tree-version 2.2.3", ("tree_version", "'2.2.3'", "mean 2.2.2?")),
    Case("tree lacks ancestor", TREE, ("[0, 1]", "lacks", "[0]"), _tree([[0, 1], [1]])),
    Case("tree path twice", TREE, ("[0, 1]", "twice"), _tree([[0], [0, 1], [0, 1]])),
    Case("tree rank too high", TREE, ("[0, 8]", "output_id_topk 8"), _tree([[0], [0, 8]])),
    Case("tree rank negative", TREE, ("[0, -1]", "ranks"), _tree([[0], [0, -1]])),
    Case("tree path empty", TREE, ("[]", "non-empty"), _tree([[0], []])),
    Case("tree not JSON", TREE, ("tree.json", "JSON"), {"tree.json": "0 1"}),
    Case("tree no list", TREE, ("tree.json", "list of rank paths"), _tree({"path": [[0]]})),
    Case("tree without paths", TREE, ("tree.json", "got no paths"), _tree({"paths": []})),
    Case("k is 0", "--output-id-topk 0", ("output_id_topk", "got 0", "1 or more")),
    Case("k is negative", "--output-id-topk -3", ("output_id_topk", "got -3", "1 or more")),
    Case("k past the vocabulary", "--output-id-topk 8193", ("output_id_topk", "8193", "8192")),
    Case("k below the tree's ranks", "--output-id-topk 2", ("2.2.2", "rank", "output_id_topk 2")),
    Case("matrix missing", LOAD + "m.safetensors", ("load_matrix", "m.safetensors")),
    Case("matrix is a folder", LOAD, ("load_matrix",)),
    Case("matrix is no safetensors", LOAD + "m", ("load_matrix", "safetensors"), {"m": "x" * 99}),
    Case("matrix of k 4", LOAD + "m.safetensors", ("[8192, 4]", "[8192, 8]"), _matrix((8192, 4))),
    Case(
        "matrix of others", LOAD + "m.safetensors", ("rows", "adjacency"), _matrix((1, 1), "rows")
    ),
    Case(
        "matrix of ids past the vocabulary",
        LOAD + "m.safetensors",
        ("matrix", "vocabulary"),
        _matrix((8192, 8), value=9000),
    ),
    Case(
        "matrix of another tokenizer",
        LOAD + "m.safetensors",
        ("load_matrix", "another tokenizer"),
        {"m.safetensors": save(_matrix((8192, 8))["m.safetensors"], {"vocabulary_sha256": "0"})},
    ),
    Case(
        "a matrix that a cold start would forget",
        LOAD + "m.safetensors --start cold",
        ("load_matrix", "start", "cold"),
        _matrix((8192, 8)),
    ),
    Case("matrix into no folder", "--save-matrix {}/none/m", ("save_matrix", "none/m", "folder")),
    Case("matrix below a file", "--save-matrix {}/q.jsonl/m", ("save_matrix",), _questions(GOOD)),
    Case("matrix onto a folder", "--save-matrix {}", ("save_matrix",)),
    Case("harvest with original", "--harvest-prompt", ("harvest_prompt",)),
    Case("cold with original", "--start cold", ("start", "cold", "recycling-averaged")),
    Case(
        "a matrix of nothing",
        "--fallback none --save-matrix {}/m",
        ("save_matrix", "keeps nothing"),
        method="samd",
    ),
    Case("a matrix for pld", "--save-matrix m", ("--save-matrix", "--help"), method="pld"),
    # other methods
    Case(
        "hybrid's table past all memory",
        "--table-bits 24 --output-id-topk 8000",
        ("table_bits, output_id_topk", "500.0 GiB", "at most 1 GiB"),
        method="hybrid",
    ),
    Case(
        "samd's chain past all memory",
        "--num-pred-tokens 10000000",
        ("num_pred_tokens", "got 10000000", "1 to 4096"),
        method="samd",
    ),
    *(
        Case(
            f"lookahead's draft past all memory by {options}",
            options,
            ("level, window, guess", f"of {num_nodes} nodes", "at most 4096"),
            method="lookahead",
        )
        for options, num_nodes in (("--level 2000", 4021988), ("--window 3000", 12040))
    ),
    Case("lookahead level 1", "--level 1", ("level", "got 1", "2 or more"), method="lookahead"),
    Case("pld n-gram 0", "--max-ngram-size 0", ("max_ngram_size", "got 0"), method="pld"),
    Case("pld option to vanilla", "--match latest", ("--match", "--help"), method="vanilla"),
    # numbers and names
    Case("no tokens", "--max-new-tokens 0", ("max_new_tokens", "got 0", "1 or more")),
    Case("negative tokens", "--max-new-tokens -5", ("max_new_tokens", "got -5", "1 or more")),
    Case("tokens in words", "--max-new-tokens ten", ("--max-new-token", "'ten'", "--help")),
    Case("no choices", "--num-choices 0", ("num_choices", "got 0")),
    Case("no threads", "--threads 0", ("threads", "got 0")),
    Case("negative warm-up", "--warmup -1", ("warmup", "got -1")),
    Case("threads past all memory", "--threads 100000", ("threads: got 100000", "allowed: 1 to")),
    Case("seed without sampling", "--seed 3", ("seed: got 3", "needs sampling")),
    Case("negative seed", "--seed -1", ("seed", "got -1")),
    Case("seed past 64 bits", f"--seed {2**64}", ("seed", str(2**64))),
    Case("negative temperature", "--temperature -1", ("temperature", "-1", "0 (greedy), or")),
    Case("temperature nan", "--temperature nan", ("temperature", "nan")),
    Case("temperature inf", "--temperature inf", ("temperature", "inf")),
    Case("top-p 0", "--temperature 1 --top-p 0", ("top_p", "got 0.0", "above 0")),
    Case("top-p nan", "--temperature 1 --top-p nan", ("top_p", "nan")),
    Case("top-k of greedy", "--top-k 5", ("top_k", "--temperature")),
    Case("option unknown", "--treee 2.2.2", ("--treee", "--help")),
    Case("option abbreviated", "--tree 2.2.2", ("--tree", "--help")),
    Case("word too many", "demo", ("demo", "--help")),
    Case("unset variable of a shell", "--answer-file=", ("--answer-file: got an empty text",)),
    Case("value missing", "--seed", ("--seed", "--help")),
    Case("dtype unknown", "--dtype fp8", ("--dtype", "'fp8'", "float32", "--help")),
    Case("half precision on CPU", "--dtype float16 --device cpu", ("dtype", "float16", "float32")),
    Case("device unknown", "--device nonsense", ("device", "'nonsense'", "cpu")),
    Case("device without numbers", "--device meta", ("device", "'meta'", "cpu")),
    Case("two workers", "--num-gpus-total 2", ("num_gpus_total", "got 2 on cpu", "--num-workers")),
    Case(
        "two GPUs on CPU",
        "--num-gpus-total 2 --num-gpus-per-model 2 --device cpu",
        ("num_gpus_per_model", "got 2", "cpu"),
    ),
    Case("template unknown", "--conv-template vicuna_v9", ("conv_template", "'vicuna_v9'", "mean")),
    Case("id with a slash", "--model-id a/b", ("model_id", "'a/b'")),
    Case("resume and overwrite", "--resume --overwrite", ("resume, overwrite", "leave one out")),
)


def _make_files(case: Case, folder: Path, tiny_model: Path) -> None:
    for name, content in case.files.items():
        file = folder / name
        (file if name.endswith("/") else file.parent).mkdir(exist_ok=True)
        if isinstance(content, tuple):
            for source in content:
                shutil.copy(tiny_model / source, file)
        elif isinstance(content, dict):
            save_file(content, file)
        else:
            file.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_mistake_is_one_line_and_exit_code_2_before_the_weights_load(
    case: Case,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _make_files(case, tmp_path, tiny_model)
    # A data folder as cloned, whatever was fetched into this one.
    data = tmp_path / "data_folder"
    shutil.copytree(DATA_FOLDER / "demo", data / "demo", ignore=shutil.ignore_patterns("model*"))
    monkeypatch.setattr("evaluation.questions.questions.DATA_FOLDER", data)
    answers = tmp_path / "answers.jsonl"
    answers.write_bytes(KEPT)
    common = ["--model-path", str(tiny_model), "--answer-file", str(answers)]
    given = [word.replace("{}", str(tmp_path)) for word in case.options.split()]
    line = error_line(case.method, [*common, *given], capsys)
    for part in case.says:
        assert part in line, f"the line should say {part!r}: {line}"
    assert answers.read_bytes() == KEPT, "a refused command wrote to answers that were there"
    assert not list(tmp_path.glob("answers.*.*")), "a refused command left files beside the answers"


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("options", "lost"),
    [
        ("--question-file {}/q.jsonl --answer-file {}/q.jsonl --overwrite", "q.jsonl"),
        ("--question-file {}/q.jsonl --answer-file {}/a.jsonl --save-matrix {}/q.jsonl", "q.jsonl"),
        ("--answer-file {}/a.jsonl --save-matrix {}/../{name}/a.jsonl", "a.jsonl"),
        ("--answer-file {}/a.jsonl --save-matrix {}/a.meta.json", "a.meta.json"),
        ("--policy accepted-last --answer-file {}/m --overwrite --load-matrix {}/m", "m"),
    ],
)
def test_no_result_is_written_over_what_is_read_or_over_another(
    options: str, lost: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "q.jsonl").write_text(json.dumps(GOOD))
    save_file({"adjacency": torch.zeros(8192, 8, dtype=torch.int32)}, tmp_path / "m")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    words = options.replace("{}", str(tmp_path)).replace("{name}", tmp_path.name).split()
    line = error_line("recycling", ["--model-path", str(tiny_model), *words], capsys)
    assert lost in line
    assert "give another file" in line
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
