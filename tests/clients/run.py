"""Clients of OpenAI's API ask the server; their figures are compared with the library's own, to the digit.

The clients live in an environment of their own (`bash scripts/clients.sh`). The method is prompt lookup with a
fixed length: its drafts depend on the text alone, so the library's figures are those of any order and company.

Run: bash scripts/clients.sh openai
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from model import SpeculativeDecoder
from model.serve.acceptance import StepCounts, vllm_fields

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "data/demo/model"
METHOD, LENGTH = "pld", 4
NUM_QUESTIONS, LIMIT = 8, 32
PREFIX = "vllm:spec_decode_num_"
CHOICES = ("Yes, of course.", "No")


class Figures(NamedTuple):
    """What a client found, or the library: exact numbers, so that they are compared for equality."""

    tokens: int
    acceptance_length: float  # of drafted steps, as vLLM counts


class Clients:
    """The clients of an environment, and the server that they ask.

    Args:
        folder: `bin` of the environment.
        address: of the server, without `/v1`.
        questions: a file of JSON lines with `text`, and `prompt` for completions.
        work: folder for what they write.
        speculators: folder with evaluate.py of vllm-project/speculators; None: it is left out.
    """

    def __init__(
        self, folder: Path, address: str, questions: Path, work: Path, speculators: Path | None
    ) -> None:
        self.folder, self.address, self.questions = folder, address, questions
        self.work, self.speculators = work, speculators

    def openai(self, ours: Ours) -> Figures:
        """OpenAI's own, streamed and not: texts too are compared."""
        script = Path(__file__).with_name("ask_openai.py")
        lines = self._run(
            "python", script, f"{self.address}/v1", self.questions, LIMIT
        ).splitlines()
        found = [json.loads(line) for line in lines]
        assert [one["text"] for one in found] == [one["streamed"] for one in found] == ours.chats
        assert all(one["metrics"] == one["streamed_metrics"] for one in found)
        accepted = sum(one["metrics"]["num_accepted_draft_tokens"] for one in found)
        steps = sum(one["metrics"]["num_spec_steps"] for one in found)
        return Figures(sum(one["tokens"] for one in found), 1 + accepted / steps)

    def langchain(self, ours: Ours) -> Figures:
        """LangChain's: a batch of chats; then streams, lists of prompts, functions and forms."""
        return self._asked("ask_langchain.py", ours)

    def litellm(self, ours: Ours) -> Figures:
        """LiteLLM's: chats; then streams, completions, functions and forms."""
        return self._asked("ask_litellm.py", ours)

    def agents(self, ours: Ours) -> Figures:
        """An agent's loop of OpenAI's Agents SDK; no figures of its own."""
        script = Path(__file__).with_name("ask_agents.py")
        found = json.loads(self._run("python", script, f"{self.address}/v1"))
        assert found["calls"] and found["items"][-1] == "message_output_item", found
        return ours.of_chats

    def _asked(self, script: str, ours: Ours) -> Figures:
        """Ask the questions, compare the texts, then ask for all else; return the figures of the questions."""
        words = ("python", Path(__file__).with_name(script), f"{self.address}/v1", self.questions)
        before, name = self.counters(), "vllm:generation_tokens_total"
        texts = json.loads(self._run(*words, LIMIT, "questions"))
        assert texts == ours.chats, texts
        found = Figures(int(self.counters()[name] - before[name]), self.acceptance_since(before))
        self._run(*words, LIMIT, "tools")
        return found

    def aiperf(self, ours: Ours) -> Figures:
        """NVIDIA's AIPerf: its own acceptance length, of all requests' histograms together."""
        words = ("profile", "--model", "demo", "--url", self.address, "--endpoint-type", "chat")
        words += ("--streaming", "--input-file", str(self.questions), "--tokenizer", str(MODEL))
        words += ("--custom-dataset-type", "single_turn", "--request-count", str(NUM_QUESTIONS))
        words += ("--concurrency", "4", "--ui-type", "none", "--use-server-token-count")
        words += ("--dataset-sampling-strategy", "sequential")
        words += ("--extra-inputs", json.dumps({"max_completion_tokens": LIMIT, "temperature": 0}))
        self._run("aiperf", *words, "--artifact-dir", self.work / "aiperf")
        (file,) = (self.work / "aiperf").rglob("profile_export_aiperf.json")
        report = json.loads(file.read_text())
        histogram = report["pooled_spec_decode_acceptance_histogram"]
        counts = {int(accepted): count for accepted, count in histogram.items()}
        accepted = sum(accepted * count for accepted, count in counts.items())
        return Figures(int(report["total_osl"]["avg"]), 1 + accepted / sum(counts.values()))

    def guidellm(self, ours: Ours) -> Figures:
        """GuideLLM: its tokens; the acceptance of its run by the server's counters."""
        file = self.work / "guidellm.json"
        backend = f"kind=openai_http,target={self.address},max_tokens={LIMIT}"
        before = self.counters()
        words = ("run", "--backend", f"{backend},extras.body.temperature=0")
        words += ("--data", f"kind=json_file,path={self.questions}")
        mapper = "kind=generative_column_mapper,column_mappings.text_column=text"
        words += ("--data-column-mapper", mapper, "--tokenizer", f"kind=hf_auto,model={MODEL}")
        words += ("--profile", "kind=throughput,max_concurrency=4", "--disable-console")
        words += ("--constraint", f"kind=max_requests,count={NUM_QUESTIONS}")
        self._run("guidellm", *words, "--output", f"kind=json,path={file}")
        (benchmark,) = json.loads(file.read_text())["benchmarks"]
        done = benchmark["requests"]["successful"]
        tokens = sum(one["output_metrics"]["text_tokens"] for one in done)
        return Figures(tokens, self.acceptance_since(before))

    def lm_eval(self, ours: Ours) -> Figures:
        """lm-eval: chats; choices by the log-probabilities of prompts; completions eight at a time.

        Texts and log-probabilities are compared; tokens and acceptance of the completions are the counters'.
        """
        until = {"until": ["@@@"], "max_gen_toks": LIMIT, "temperature": 0}
        free = {
            "output_type": "generate_until",
            "doc_to_target": "",
            "generation_kwargs": until,
            "metric_list": [{"metric": "exact_match"}],
        }
        chats = self._lm_eval("chat", "local-chat-completions", {"doc_to_text": "{{text}}", **free})
        assert [one["resps"][0][0] for one in chats] == ours.chats
        choices = {
            "output_type": "multiple_choice",
            "doc_to_text": "{{prompt}}",
            "doc_to_choice": list(CHOICES),
            "doc_to_target": 0,
            "metric_list": [{"metric": "acc"}],
        }
        judged = self._lm_eval("choice", "local-completions", choices)
        found = [float(choice[0][0]) for one in judged for choice in one["resps"]]
        assert len(found) == len(ours.logprobs)
        assert all(abs(a - b) < 1e-3 for a, b in zip(found, ours.logprobs, strict=True)), found
        before, name = self.counters(), "vllm:generation_tokens_total"
        plain = self._lm_eval("plain", "local-completions", {"doc_to_text": "{{prompt}}", **free})
        assert [one["resps"][0][0] for one in plain] == ours.completions
        after = self.counters()
        return Figures(int(after[name] - before[name]), self.acceptance_since(before))

    def _lm_eval(self, name: str, model: str, task: dict[str, Any]) -> list[dict[str, Any]]:
        """Run a task on the questions; return its samples in their order."""
        folder, is_chat = self.work / f"lm_eval-{name}", "chat" in model
        folder.mkdir()
        data = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(self.questions)}},
        }
        whole = {"task": name, **data, "test_split": "test", **task}
        (folder / f"{name}.yaml").write_text(json.dumps(whole))  # YAML reads JSON
        path = "chat/completions" if is_chat else "completions"
        given = f"model=demo,base_url={self.address}/v1/{path},num_concurrent=4"
        given += f",tokenizer_backend=huggingface,tokenizer={MODEL},tokenized_requests=False"
        words = ["run", "--model", model, "--model_args", given, "--tasks", name]
        words += ["--include_path", str(folder), "--log_samples", "--output_path", str(folder)]
        words += ["--apply_chat_template"] if is_chat else ["--batch_size", "8"]
        self._run("lm_eval", *words)
        (file,) = folder.rglob("samples_*.jsonl")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        return sorted(samples, key=lambda one: one["doc_id"])

    def evaluate(self, ours: Ours) -> Figures:
        """The evaluate.py of speculators: GuideLLM between two readings of the counters, in its own table."""
        assert self.speculators is not None
        folder, before = self.work / "speculators", self.counters()
        mapper = "kind=generative_column_mapper,column_mappings.text_column=text"
        words = ("--target", f"{self.address}/v1", "--dataset", str(self.questions))
        words += ("--subsets", "demo", "--output-dir", str(folder), "--data-column-mapper", mapper)
        words += ("--max-concurrency", "4", "--max-requests", str(NUM_QUESTIONS))
        words += ("--gen-kwargs", json.dumps({"max_completion_tokens": LIMIT, "temperature": 0}))
        self._run("python", self.speculators / "evaluate.py", "throughput", *words)
        (row,) = csv.DictReader((folder / "acceptance.csv").open())
        name = "vllm:generation_tokens_total"
        return Figures(int(self.counters()[name] - before[name]), float(row["acceptance_length"]))

    def counters(self) -> dict[str, float]:
        """Return the server's counters by name, those by position left out."""
        with urllib.request.urlopen(f"{self.address}/metrics") as page:
            lines = page.read().decode().splitlines()
        samples = (
            line.rpartition(" ") for line in lines if line[0] != "#" and "position" not in line
        )
        return {name.partition("{")[0]: float(value) for name, _, value in samples}

    def acceptance_since(self, before: dict[str, float]) -> float:
        """Return the acceptance length since a reading of the counters."""
        after = self.counters()
        drafts, accepted = (
            after[name] - before[name]
            for name in (f"{PREFIX}drafts_total", f"{PREFIX}accepted_tokens_total")
        )
        return 1 + accepted / drafts

    def _run(self, command: str, *words: object) -> str:
        """Run a command of the clients' environment; return its standard output."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if command != "aiperf":  # which then takes a folder for a name of the hub
            environment["HF_HUB_OFFLINE"] = "1"
        environment["PATH"] = f"{self.folder}{os.pathsep}{environment['PATH']}"
        done = subprocess.run(
            [str(self.folder / command), *map(str, words)],
            env=environment,
            cwd=self.work,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{command} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return done.stdout


class Ours:
    """The library's own answers to the questions.

    Attributes:
        chats, completions: the texts.
        logprobs: of each of `CHOICES` after each prompt.
        of_chats, of_completions: their figures.
    """

    def __init__(self, questions: Sequence[dict[str, str]]) -> None:
        decoder = SpeculativeDecoder.from_pretrained(
            MODEL, METHOD, dtype=torch.float32, num_pred_tokens=LENGTH
        )
        chats: list[Any] = [[{"role": "user", "content": one["text"]}] for one in questions]
        self.chats, self.of_chats = _answered(decoder, chats)
        prompts = [one["prompt"] for one in questions]
        self.completions, self.of_completions = _answered(decoder, prompts)
        pairs = [(prompt, choice) for prompt in prompts for choice in CHOICES]
        self.logprobs = [_logprob(decoder, *pair) for pair in pairs]


def _answered(decoder: SpeculativeDecoder, prompts: list[Any]) -> tuple[list[str], Figures]:
    outputs = [decoder.generate(prompt, max_new_tokens=LIMIT) for prompt in prompts]
    steps = [StepCounts.of(step) for output in outputs for step in output.steps]
    length = vllm_fields(steps)["mean_acceptance_length"]
    return [one.text for one in outputs], Figures(sum(step.tokens for step in steps), length)


@torch.inference_mode()
def _logprob(decoder: SpeculativeDecoder, prompt: str, choice: str) -> float:
    """Return the log-probability of a choice after a prompt, as lm-eval divides them into tokens."""
    num_prompt = len(decoder.tokenizer(prompt).input_ids)
    ids = decoder.tokenizer(f"{prompt} {choice}", return_tensors="pt").input_ids
    rows = decoder.target.model(ids).logits[0].log_softmax(-1)
    return sum(float(rows[place - 1, ids[0, place]]) for place in range(num_prompt, ids.shape[1]))


@contextmanager
def server(*options: str) -> Iterator[tuple[str, int]]:
    """Serve the demo model in another process; yield its address and the process's id."""
    words = [sys.executable, "-m", "model.serve", str(MODEL), "--served-model-name", "demo"]
    words += ["--port", "0", "--threads", "1", *options]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = next((line for line in process.stderr if " at http" in line), "")
        if not line:
            raise SystemExit("the server did not start")
        yield line.split(" at ")[1].strip().removesuffix("/v1"), process.pid
    finally:
        process.terminate()
        process.wait(60)


def read_questions(number: int) -> list[dict[str, str]]:
    """Return the first turns of demo questions, as chats and as texts to go on with."""
    lines = (ROOT / "data/demo/question.jsonl").read_text().splitlines()
    turns = [json.loads(line)["turns"][0] for line in lines[:number]]
    return [{"text": turn, "prompt": f"USER: {turn} ASSISTANT:"} for turn in turns]


def main() -> int:
    """Run the clients named; return 1 if a figure differs."""
    names = (
        "openai",
        "langchain",
        "litellm",
        "agents",
        "aiperf",
        "guidellm",
        "lm_eval",
        "evaluate",
    )
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="+", choices=names)
    parser.add_argument("--folder", type=Path, required=True, help="bin of their environment")
    parser.add_argument("--speculators", type=Path, help="folder of speculators' evaluate.py")
    options = parser.parse_args()
    questions = read_questions(NUM_QUESTIONS)
    ours, is_equal = Ours(questions), True
    print(
        f"{'client':10} {'tokens':>7} {'ours':>7}   acceptance length, by vLLM's definition; ours"
    )
    method = ("--method", METHOD, "--num-pred-tokens", str(LENGTH))
    with tempfile.TemporaryDirectory() as name, server(*method) as (address, _):
        work = Path(name)
        file = work / "questions.jsonl"
        file.write_text("".join(json.dumps(one) + "\n" for one in questions))
        clients = Clients(options.folder.absolute(), address, file, work, options.speculators)
        for client in options.clients:
            run: Callable[[Ours], Figures] = getattr(clients, client)
            found = run(ours)
            own = ours.of_completions if client == "lm_eval" else ours.of_chats
            is_equal &= found == own
            shown = f"{client:10} {found.tokens:7} {own.tokens:7}   {found.acceptance_length!r} "
            print(
                f"{shown}{own.acceptance_length!r}{'' if found == own else '   DIFFERS'}",
                flush=True,
            )
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
