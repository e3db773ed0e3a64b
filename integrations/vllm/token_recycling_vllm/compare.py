"""Compares speculative methods of vLLM on the same prompts, each at each batch size in a process of its own.

    python -m token_recycling_vllm.compare --model MODEL --methods none ngram recycling
    python -m token_recycling_vllm.compare --model MODEL --methods none recycling --batch-sizes 1 2 8 --json FILE
    python -m token_recycling_vllm.compare --model MODEL --question-file data/spec_bench/question.jsonl

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
    given = list(sys.argv[1:] if arguments is None else arguments)
    results: dict[str, dict[str, Any]] = {method: {} for method in options.methods}
    # Repetitions of all methods in turn, so that a machine that changes its speed changes it for all.
    for repetition in range(options.repetitions):
        for size in options.batch_sizes:
            for method in options.methods:
                print(
                    f"{method}, batch of {size}, {repetition + 1} ...", file=sys.stderr, flush=True
                )
                run = _in_own_process([*given, "--one", method, "--batch-sizes", str(size)])
                results[method].setdefault(str(size), []).append(run)
    _print_table(results)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    runs = [run for sizes in results.values() for of_size in sizes.values() for run in of_size]
    if any("error" in run for run in runs):
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
    parser.add_argument(
        "--question-file",
        metavar="FILE",
        help="JSONL of Spec-Bench; their first turns are the prompts",
    )
    parser.add_argument(
        "--num-questions", type=int, default=40, metavar="N", help="spread over the file (40)"
    )
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


def _in_own_process(arguments: Sequence[str]) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "token_recycling_vllm.compare", *arguments],
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
    prompts = _prompts(llm, _questions(options))
    llm.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=options.max_new_tokens)
    result = _run(llm, prompts, params, options.batch_sizes[0])
    if method == "recycling":
        drafters = llm.collective_rpc(lambda worker: vars(worker.model_runner.drafter.counters))
        result["counters"] = drafters[0]
    return result


def _questions(options: argparse.Namespace) -> list[str]:
    if not options.question_file:
        return list(PROMPTS)
    lines = Path(options.question_file).read_text(encoding="utf-8").splitlines()
    step = max(1, len(lines) // options.num_questions)
    return [json.loads(line)["turns"][0] for line in lines[::step][: options.num_questions]]


def _prompts(llm: Any, questions: Sequence[str]) -> list[str]:
    tokenizer = llm.get_tokenizer()
    if not getattr(tokenizer, "chat_template", None):
        return [f"USER: {prompt} ASSISTANT:" for prompt in questions]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt in questions
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


def _print_table(results: dict[str, dict[str, Any]]) -> None:
    print(
        "| method | batch | acceptance length | tokens/CPU s | tokens/s | to none (CPU) | tokens equal none's |"
    )
    print("|---|---:|---:|---:|---:|---:|---|")
    for method, sizes in results.items():
        for size, runs in sizes.items():
            errors = [run["error"] for run in runs if "error" in run]
            if errors:
                print(f"| {method} | {size} | failed: {errors[0]} | | | | |")
                continue
            drafts, accepted = (sum(run[name] for run in runs) for name in ("drafts", "accepted"))
            length = f"{1 + accepted / drafts:.2f}" if drafts else "-"
            ratio, equal = "-", "-"
            plain = results.get("none", {}).get(size, [])
            if plain and not any("error" in run for run in plain):
                ratios = [
                    _rate(run, "cpu_seconds") / _rate(none, "cpu_seconds")
                    for run, none in zip(runs, plain, strict=True)
                ]
                ratio = f"{sum(ratios) / len(ratios):.2f}x"
                if len(ratios) > 1:
                    ratio += f" [{min(ratios):.2f}, {max(ratios):.2f}]"
                pairs = [
                    (tokens, others)
                    for run, none in zip(runs, plain, strict=True)
                    for tokens, others in zip(run["tokens"], none["tokens"], strict=True)
                ]
                equal = f"{sum(tokens == others for tokens, others in pairs)} of {len(pairs)}"
            cpu, wall = (
                sum(_rate(run, name) for run in runs) / len(runs)
                for name in ("cpu_seconds", "seconds")
            )
            print(f"| {method} | {size} | {length} | {cpu:.1f} | {wall:.1f} | {ratio} | {equal} |")


def _rate(run: dict[str, Any], seconds: str) -> float:
    """Return tokens a second."""
    return float(sum(map(len, run["tokens"])) / run[seconds])


if __name__ == "__main__":
    main()
