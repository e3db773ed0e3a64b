"""The drafter in vLLM itself: bash integrations/vllm/test.sh

On the demo model, or another: MODEL=data/models/smollm2-135m bash integrations/vllm/test.sh
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.hang import HANG

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: bash integrations/vllm/test.sh")

from token_recycling_vllm import seams  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402
from vllm.sampling_params import StructuredOutputsParams  # noqa: E402

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / os.environ.get("MODEL", "data/demo/model"))
CONFIG = json.loads((Path(MODEL) / "config.json").read_text())
# Keys and values of a token in float32, in bytes.
TOKEN_BYTES = (
    2 * 4 * CONFIG["num_hidden_layers"] * CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
)
SPECULATIVE = {
    "method": "custom_class",
    "model": "token_recycling_vllm.RecyclingProposer",
    "num_speculative_tokens": 5,
}
PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain in simple words how rain forms, step by step.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "A train travels 60 km in 45 minutes. How far does it travel in two hours at the same speed?",
    "Give me a recipe for vegetable soup with a list of ingredients.",
    "Translate into French: The weather is nice today, and we are going to the beach.",
    "Summarize: The committee met on Monday to discuss the budget. The committee agreed that the "
    "budget for the library should grow, and that the budget for the park should stay the same.",
    "List ten tips for learning a new language, with a sentence for each.",
)
TEXTS = [f"USER: {prompt} ASSISTANT:" for prompt in PROMPTS]
GREEDY = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
CHUNKED = {"max_num_batched_tokens": 32, "enable_chunked_prefill": True}
ENOUGH, SMALL = 5400 * TOKEN_BYTES, 850 * TOKEN_BYTES
SMALL_MEMORY = {"kv_cache_memory_bytes": SMALL}


def engine(speculative: dict | None = SPECULATIVE, options: dict | None = None, **settings) -> LLM:
    defaults = {
        "model": MODEL,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": ENOUGH,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
    }
    own = {"token_recycling": {"debug": True, **(options or {})}}
    return LLM(**{**defaults, **settings}, speculative_config=speculative, additional_config=own)


def tokens(llm: LLM, params: SamplingParams, size: int) -> list[list[int]]:
    found = []
    for first in range(0, len(TEXTS), size):
        answers = llm.generate(TEXTS[first : first + size], params, use_tqdm=False)
        found += [list(answer.outputs[0].token_ids) for answer in answers]
    return found


def counters(llm: LLM) -> dict:
    return llm.collective_rpc(lambda worker: vars(worker.model_runner.drafter.counters))[0]


def metric(llm: LLM, name: str) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name == f"vllm:spec_decode_{name}")


SPECIAL = [
    SamplingParams(
        temperature=0,
        max_tokens=40,
        structured_outputs=StructuredOutputsParams(regex="[a-z ]{8,60}"),
    ),
    SamplingParams(temperature=0, max_tokens=60, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(
        temperature=0, max_tokens=60, presence_penalty=0.5, frequency_penalty=0.3, ignore_eos=True
    ),
    SamplingParams(temperature=0, max_tokens=60, logprobs=3, prompt_logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=80, stop=[" the", "."]),
    SamplingParams(temperature=0, max_tokens=500, ignore_eos=True),  # to the end of the context
    SamplingParams(temperature=0, max_tokens=60, bad_words=["the"], ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=1),
]


@pytest.fixture(scope="module")
def plain() -> dict:
    """Tokens without speculation."""
    llm = engine(None)
    special = llm.generate(TEXTS, SPECIAL, use_tqdm=False)
    return {
        "greedy": tokens(llm, GREEDY, 1),
        "special": [list(answer.outputs[0].token_ids) for answer in special],
    }


@pytest.fixture(scope="module")
def drafting() -> LLM:
    return engine()


@pytest.mark.parametrize("size", [1, 2, 8])
def test_tokens_equal_those_without_speculation(plain, drafting, size):
    assert tokens(drafting, GREEDY, size) == plain["greedy"]


def test_requests_of_every_kind_in_one_batch_equal_too(plain, drafting):
    answers = drafting.generate(TEXTS, SPECIAL, use_tqdm=False)
    assert [list(answer.outputs[0].token_ids) for answer in answers] == plain["special"]


def test_drafts_are_accepted_and_every_learned_row_is_its_tokens(plain, drafting):
    tokens(drafting, GREEDY, 1)
    drafts, accepted = metric(drafting, "num_drafts"), metric(drafting, "num_accepted_tokens")
    for size in (1, 2, 8):
        tokens(drafting, GREEDY, size)
    drafts, accepted = (
        metric(drafting, "num_drafts") - drafts,
        metric(drafting, "num_accepted_tokens") - accepted,
    )
    assert 1 + accepted / drafts > 2.5  # answers seen before
    counted = counters(drafting)
    assert counted["wrong"] == 0
    assert counted["checked"] == counted["learned"] > 0.9 * counted["rows"]


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, CHUNKED),
        ({"depth": "full"}, {**CHUNKED, **SMALL_MEMORY}),
        ({"share": False, "depth": "full"}, SMALL_MEMORY),
        ({}, {"enable_prefix_caching": True}),
    ],
    ids=["chunked prefill", "chunked, small memory", "not shared, small memory", "prefix caching"],
)
def test_other_schedules_equal_too(plain, options, settings):
    llm = engine(options=options, **settings)
    assert tokens(llm, GREEDY, 1) == plain["greedy"]
    assert tokens(llm, GREEDY, 8) == plain["greedy"]
    counted = counters(llm)
    assert counted["wrong"] == 0 and counted["checked"] > 1000
    assert counted["learned"] > 0.8 * counted["rows"]


def test_sampling_is_refused_with_the_reason(drafting):
    with pytest.raises(VLLMValidationError, match=r"temperature: got 0\.8; allowed: 0"):
        drafting.generate(TEXTS[:1], SamplingParams(temperature=0.8), use_tqdm=False)


def test_a_wrong_option_and_an_unknown_vllm_are_refused(monkeypatch):
    with pytest.raises(RuntimeError, match="got 'topk'; allowed: top_k"):
        engine(options={"topk": 3})
    changed: seams.Hook = (
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.propose_draft_token_ids",
        ("drafts",),
    )
    monkeypatch.setattr(seams, "HOOKS", (changed,))
    with pytest.raises(
        RuntimeError, match=rf"does not fit vLLM {seams.installed_version()}.*no parameter drafts"
    ):
        engine()


def test_a_saved_matrix_is_loaded(tmp_path, drafting):
    file = tmp_path / "matrix.safetensors"
    drafting.collective_rpc(lambda worker: worker.model_runner.drafter._tables.save(file))
    llm = engine(options={"load_matrix": str(file), "history_tokens": 0, "depth": "full"})
    tokens(llm, GREEDY, 8)
    assert metric(llm, "num_drafts") > 0


def test_the_server_answers_and_counts(plain):
    """The command of the README: python -m vllm.entrypoints.openai.api_server is `vllm serve`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL),
        *("--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512"),
        *("--kv-cache-memory-bytes", str(ENOUGH)),
        *("--speculative-config", json.dumps(SPECULATIVE)),
        *("--additional-config", json.dumps({"token_recycling": {"top_k": 8}})),
    ]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=dict(os.environ), text=True
    )

    def answer(path: str, data: dict | None = None) -> str:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=HANG) as response:
            return response.read().decode()

    try:
        for _ in range(2 * int(HANG)):
            assert server.poll() is None, server.stdout.read()[-2000:]
            try:
                answer("/health")
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        question = {
            "model": "demo",
            "prompt": TEXTS[0],
            "max_tokens": 96,
            "temperature": 0,
            "ignore_eos": True,
        }
        first, second = (json.loads(answer("/v1/completions", question)) for _ in range(2))
        assert first["choices"][0]["text"] == second["choices"][0]["text"]
        assert first["usage"]["completion_tokens"] == 96
        assert "vllm:spec_decode_num_accepted_tokens_total" in answer("/metrics")
        with pytest.raises(urllib.error.HTTPError) as refused:
            answer("/v1/completions", {**question, "temperature": 0.8})
        assert refused.value.code == 400
        assert "wrong distribution" in refused.value.read().decode()
    finally:
        server.terminate()
        server.wait(HANG)
