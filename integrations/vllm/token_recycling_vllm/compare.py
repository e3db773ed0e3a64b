"""Compares speculative methods of vLLM on the same prompts, each in a process of its own.

    python -m token_recycling_vllm.compare --model MODEL --methods none ngram recycling
    python -m token_recycling_vllm.compare --model MODEL --methods none recycling --batch-sizes 1 2 8 --json FILE

Tokens of every method are compared with those of no speculation. Tokens a CPU second are those of the
engine's process, for machines without a GPU; tokens a second are what a user waits for. The
acceptance length is 1 + accepted / drafts, by vLLM's own counters.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
# Speculative configurations by method; K stands for --num-speculative-tokens.
SPECULATIVE: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix"},
    "draft_model": {"method": "draft_model"},
    "recycling": {
        "method": "custom_class",
        "model": "token_recycling_vllm.RecyclingProposer",
    },
}
# Everything in one process, so that its CPU seconds are all; threads that wait do not spin.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = _parser().parse_args(arguments)
    if options.one:
        print(json.dumps(_measure(options.one, options)))
        return
    results = {}
    for method in options.methods:
        print(f"{method} ...", file=sys.stderr, flush=True)
        results[method] = _in_own_process(method, sys.argv[1:] if arguments is None else arguments)
    _print_table(results, options.batch_sizes)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    if any(result.get("error") for result in results.values()):
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or hub name")
    parser.add_argument(
        "--methods", nargs="+", choices=SPECULATIVE, default=["none", "ngram", "recycling"]
    )
    parser.add_argument("--draft-model", help="model of draft_model")
    parser.add_argument("--num-speculative-tokens", type=int, default=5, metavar="K")
    parser.add_argument("--max-new-tokens", type=int, default=160, metavar="N")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8], metavar="N")
    parser.add_argument("--repetitions", type=int, default=1, metavar="N")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-model-len", type=int, default=2048, metavar="N")
    parser.add_argument(
        "--recycling-options", type=json.loads, default={}, metavar="JSON", help='{"depth": "full"}'
    )
    parser.add_argument(
        "--engine-options",
        type=json.loads,
        default={},
        metavar="JSON",
        help="further ones of vllm.LLM",
    )
    parser.add_argument("--json", metavar="FILE", help="write the results, tokens included")
    parser.add_argument("--one", choices=SPECULATIVE, help=argparse.SUPPRESS)
    return parser


def _in_own_process(method: str, arguments: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "token_recycling_vllm.compare", *arguments, "--one", method]
    run = subprocess.run(
        command,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
    )
    if run.returncode:
        lines = run.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"exit code {run.returncode}"}
    result: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return result


def _measure(method: str, options: argparse.Namespace) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    speculative = SPECULATIVE[method]
    if speculative is not None:
        speculative = {**speculative, "num_speculative_tokens": options.num_speculative_tokens}
        if method == "draft_model":
            speculative["model"] = options.draft_model
    llm = LLM(
        **{
            "model": options.model,
            "dtype": options.dtype,
            "max_model_len": options.max_model_len,
            "max_num_seqs": max(options.batch_sizes),
            "speculative_config": speculative,
            "additional_config": {"token_recycling": options.recycling_options},
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "kv_cache_memory_bytes": 512 << 20,
            "seed": 0,
            **options.engine_options,
        }
    )
    prompts = _prompts(llm)
    warm_up = SamplingParams(temperature=0, max_tokens=8)
    llm.generate(prompts[:1], warm_up, use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=options.max_new_tokens)
    runs: dict[str, Any] = {}
    for size in options.batch_sizes:
        runs[str(size)] = [_run(llm, prompts, params, size) for _ in range(options.repetitions)]
    counters = None
    if method == "recycling":
        counters = llm.collective_rpc(lambda worker: vars(worker.model_runner.drafter.counters))[0]
    return {"runs": runs, "counters": counters}


def _prompts(llm: Any) -> list[str]:
    tokenizer = llm.get_tokenizer()
    if not getattr(tokenizer, "chat_template", None):
        return [f"USER: {prompt} ASSISTANT:" for prompt in PROMPTS]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt in PROMPTS
    ]


def _run(llm: Any, prompts: list[str], params: Any, size: int) -> dict[str, Any]:
    before = _counts(llm)
    tokens: list[list[int]] = []
    wall, cpu = time.perf_counter(), time.process_time()
    for first in range(0, len(prompts), size):
        answers = llm.generate(prompts[first : first + size], params, use_tqdm=False)
        tokens += [list(answer.outputs[0].token_ids) for answer in answers]
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    drafts, drafted, accepted = (now - then for now, then in zip(_counts(llm), before, strict=True))
    return {
        "tokens": tokens,
        "seconds": wall,
        "cpu_seconds": cpu,
        "drafts": drafts,
        "drafted": drafted,
        "accepted": accepted,
    }


def _counts(llm: Any) -> tuple[int, int, int]:
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    drafts, drafted, accepted = (values.get(f"vllm:spec_decode_{name}", 0) for name in names)
    return drafts, drafted, accepted


def _print_table(results: dict[str, Any], sizes: Sequence[int]) -> None:
    print(
        "| method | batch | acceptance length | tokens/CPU s | tokens/s | to none (CPU) | tokens equal none's |"
    )
    print("|---|---:|---:|---:|---:|---:|---|")
    plain = results.get("none", {})
    for method, result in results.items():
        if "error" in result:
            print(f"| {method} | failed: {result['error']} | | | | | |")
            continue
        for size in map(str, sizes):
            runs = result["runs"][size]
            count = sum(len(tokens) for run in runs for tokens in run["tokens"])
            cpu, wall, drafts, accepted = (
                sum(run[name] for run in runs)
                for name in ("cpu_seconds", "seconds", "drafts", "accepted")
            )
            length = f"{1 + accepted / drafts:.2f}" if drafts else "-"
            ratio, equal = "-", "-"
            if "runs" in plain:
                of_none = plain["runs"][size]
                none = sum(len(tokens) for run in of_none for tokens in run["tokens"])
                ratio = f"{count / cpu / (none / sum(run['cpu_seconds'] for run in of_none)):.2f}x"
                pairs = [
                    (tokens, others)
                    for run, other in zip(runs, of_none, strict=True)
                    for tokens, others in zip(run["tokens"], other["tokens"], strict=True)
                ]
                equal = f"{sum(tokens == others for tokens, others in pairs)} of {len(pairs)}"
            print(
                f"| {method} | {size} | {length} | {count / cpu:.1f} | {count / wall:.1f} | {ratio} | {equal} |"
            )


if __name__ == "__main__":
    main()
