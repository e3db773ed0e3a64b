"""llama.cpp answers the same prompts in turn with methods, into ordinary answer files; a stand-in takes its place.

Its server has a process of its own: here that of the tests, but for a test of the process.

Run: pytest tests/evaluation/inference/engines/test_llama_cpp.py
"""

from __future__ import annotations

import json
import sys
import threading
import weakref
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from evaluation import compare
from evaluation.answers.answer_file import read_lines
from evaluation.answers.defects import find_defects
from evaluation.inference.engines import participant
from evaluation.reporting.notes import group_notes
from evaluation.scoring.comparable import group_answers, load_answers
from model.commands.command_line import UserError
from tests.evaluation.conftest import read_meta, read_rows
from tests.evaluation.inference.engines.stand_in import InThisProcess
from tests.model.api.loading.tiny_gguf import tiny_llama, write_gguf

NEW = 8
FEW = ["--threads", "1", "--max-new-tokens", str(NEW), "--question-end", "2", "--warmup", "1"]


class FakeServer:
    """Decodes with the model that the file was made of; with speculation every second token is a draft's."""

    started: list[FakeServer]

    def __init__(self, params: SimpleNamespace) -> None:
        self.params, self.asked, self.changed = params, list[dict[str, Any]](), False
        self.model = tiny_llama()
        self.web = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        threading.Thread(target=self.web.serve_forever, args=(0.01,), daemon=True).start()
        self.listening_address = f"http://127.0.0.1:{self.web.server_port}"
        self.started.append(self)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(asked)
        if len(asked["prompt"]) > self.params.n_ctx:
            return {"error": {"message": "too long"}}
        prompt, count = torch.tensor([asked["prompt"]]), asked["n_predict"]
        ids = self.model.generate(prompt, max_new_tokens=count, do_sample=False, pad_token_id=0)
        found = ids[0, prompt.shape[1] :].tolist()
        timings = {"prompt_ms": 2.0, "predicted_ms": 3.0}
        if self.params.speculative.types:
            timings |= {"draft_n": count, "draft_n_accepted": count // 2}
        return {"tokens": found, "timings": timings, "stop_type": "limit"}

    def handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/completion"
                reply = json.dumps(server.answer(json.loads(content))).encode()
                self.send_response(400 if b'"error"' in reply else 200)
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *_: Any) -> None:
                return

        return Handler


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeServer]]:
    """The servers that are started by a module in place of xllamacpp."""
    module: Any = ModuleType("xllamacpp")
    module.__version__ = "1.2"
    module.Server = FakeServer
    module.CommonParams = lambda: SimpleNamespace(
        **{name: SimpleNamespace() for name in ("model", "cpuparams", "cpuparams_batch")},
        speculative=SimpleNamespace(
            types=[],
            ngram_simple=SimpleNamespace(size_n=12, size_m=48),
            ngram_mod=SimpleNamespace(n_match=24, n_max=64, n_min=48),
            draft=SimpleNamespace(n_max=3, mparams=SimpleNamespace()),
        ),
    )
    module.common_speculative_type = SimpleNamespace(
        COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE="simple",
        COMMON_SPECULATIVE_TYPE_NGRAM_MOD="mod",
        COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE="draft",
    )
    monkeypatch.setitem(sys.modules, "xllamacpp", module)
    module.get_system_info = lambda: "CPU : SSE3 = 1 | AVX2 = 1 | FMA = 0 | OPENMP = 1 | "
    monkeypatch.setattr(participant, "find_spec", lambda _: object())
    monkeypatch.setattr(participant, "EngineProcess", InThisProcess)
    monkeypatch.setattr(participant, "instruction_sets", lambda: ["avx2"])
    FakeServer.started = []
    yield FakeServer.started
    for server in FakeServer.started:
        server.web.shutdown()
        server.web.server_close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as a GGUF file."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama())


def test_llama_cpp_answers_the_same_prompts_into_ordinary_files(
    file: Path, tmp_path: Path, started: list[FakeServer]
) -> None:
    words = ["--model-path", str(file), *FEW, "--out", str(tmp_path)]
    names = ["vanilla", "llama.cpp", "llama.cpp-ngram"]
    assert compare.main(["--methods", *names, *words]) == 0
    paths = {
        name: tmp_path / f"tiny.gguf-{name}-float32-temp-0.0-{NEW}.jsonl"
        for name in (*names, "vanilla-again")
    }
    rows = {name: read_rows(path) for name, path in paths.items()}
    assert not [flaw for path in paths.values() for flaw in find_defects("x", read_lines(path))]
    base = rows["vanilla"]
    for name, num_steps in (("llama.cpp", NEW), ("llama.cpp-ngram", NEW // 2)):
        for mine, row in zip(base, rows[name], strict=True):
            (choice,), (expected,) = row["choices"], mine["choices"]
            for key in ("turns", "token_ids", "new_tokens", "prompt_tokens", "stop_reasons"):
                assert choice[key] == expected[key], key
            assert set(choice["decoding_steps"]) == {num_steps}
            assert set(choice["prefill_time"]) == {0.002} and set(choice["decode_time"]) == {0.003}
            assert all(wall > 0 for wall in choice["wall_time"])
        meta = read_meta(paths[name])
        assert (meta["method"], meta["is_served"], meta["dtype"]) == (name, True, None)
        assert meta["engine"]["program"] == "xllamacpp 1.2" and meta["threads"] == 1
        assert meta["engine"]["features"] == "SSE3 AVX2 OPENMP" and meta["engine"]["lacks"] == ""
    # Of one that learns, the warm-up's server is not the one that is measured.
    plain, warmed, measured = started
    assert [one.params.speculative.types for one in started] == [[], ["simple"], ["simple"]]
    assert plain.params.model.path == str(file) and plain.params.cpuparams.n_threads == 1
    num_turns = sum(len(row["choices"][0]["turns"]) for row in base)
    assert len(measured.asked) == num_turns == len(plain.asked) - len(warmed.asked)
    sent = measured.asked[0]
    assert (sent["temperature"], sent["cache_prompt"], sent["n_predict"]) == (0, False, NEW)


def test_sizes_and_models_of_drafts_are_given_to_llama_cpp(
    file: Path, tmp_path: Path, started: list[FakeServer]
) -> None:
    words = ["--model-path", str(file), *FEW, "--warmup", "0", "--out", str(tmp_path)]
    of_mod = "llama.cpp-ngram --speculation ngram_mod --ngram 3 --draft 8"
    names = [of_mod, f"llama.cpp-draft --draft-model {file}"]
    assert compare.main(["--methods", "vanilla", *names, *words]) == 0
    by_ngrams, by_model = {one.params.speculative.types[0]: one for one in started}.values()
    given = by_ngrams.params.speculative.ngram_mod
    assert (given.n_match, given.n_max, given.n_min) == (3, 8, 1)
    given = by_model.params.speculative.draft
    assert (given.n_max, given.mparams.path) == (3, str(file))


def test_a_run_s_engines_end_before_the_next_run_s_begin(
    file: Path, tmp_path: Path, started: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[InThisProcess]] = []
    most = []

    class Watched(InThisProcess):
        def __init__(self, *given: Any) -> None:
            most.append(sum(one() is not None for one in alive))
            super().__init__(*given)
            alive.append(weakref.ref(self))

    monkeypatch.setattr(participant, "EngineProcess", Watched)
    words = ["--model-path", str(file), *FEW, "--runs", "2", "--out", str(tmp_path)]
    assert compare.main(["--methods", "vanilla", "llama.cpp", *words]) == 0
    assert most == [0, 0]


def test_other_tokens_of_llama_cpp_are_rounding_and_not_a_fault(
    file: Path, tmp_path: Path, started: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = FakeServer.answer

    def other(self: FakeServer, asked: dict[str, Any]) -> dict[str, Any]:
        reply = answer(self, asked)
        return reply | {"tokens": [*reply["tokens"][:-1], 70]}

    monkeypatch.setattr(FakeServer, "answer", other)
    words = ["--model-path", str(file), *FEW, "--out", str(tmp_path)]
    assert compare.main(["--methods", "vanilla", "llama.cpp", *words]) == 0
    files = [load_answers(path) for path in sorted(tmp_path.glob("*.jsonl"))]
    (group,) = group_answers(files)
    (row,) = [one for one in group.rows if one.entry.method == "llama.cpp"]
    assert (row.equality.num_differing, row.equality.num_compared) == (2, 2)
    assert not row.equality.is_broken
    (note,) = [note for note in group_notes(group, None) if "round otherwise" in note]
    assert note.startswith("llama.cpp has other answers to 2 of 2 questions: another program may")


def test_what_llama_cpp_refuses_is_the_cause_of_a_failed_question(
    file: Path, tmp_path: Path, started: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeServer, "answer", lambda *_: {"error": {"message": "too long"}})
    words = ["--model-path", str(file), *FEW, "--out", str(tmp_path)]
    assert compare.main(["--methods", "vanilla", "llama.cpp", *words]) == 1
    (path,) = tmp_path.glob("*llama.cpp*.jsonl")
    assert {row["error"] for row in read_rows(path)} == {"RuntimeError: llama.cpp: too long"}


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--model-path", "data/demo/model"], "allowed: a GGUF file; give --model-path FILE.gguf"),
        (["--temperature", "0.7"], "temperature: got 0.7 with llama.cpp; allowed: 0; leave"),
        (["--repetition-penalty", "1.1"], "repetition_penalty: got 1.1 with llama.cpp; allowed: 1"),
        (["--stop", "a", "b"], "stop: got a b with llama.cpp; allowed: none; leave"),
        (["--batch-size", "2"], "batch_size: got 2 with llama.cpp; allowed: 1"),
    ],
)
def test_what_llama_cpp_cannot_do_is_refused_before_the_weights_load(
    file: Path, tmp_path: Path, started: list[FakeServer], words: list[str], named: str
) -> None:
    given = ["--methods", "vanilla", "llama.cpp", "--out", str(tmp_path)]
    with pytest.raises(UserError) as error:
        compare.main([*given, "--model-path", str(file), *words])
    assert named in str(error.value) and not started


@pytest.mark.usefixtures("no_weights")
def test_without_its_package_llama_cpp_is_refused_in_one_line(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(participant, "find_spec", lambda _: None)
    for name in ("llama.cpp", "llama.cpp-ngram"):
        with pytest.raises(UserError, match="needs xllamacpp; pip install xllamacpp"):
            compare.main(["--methods", "vanilla", name, "--model-path", str(file)])
