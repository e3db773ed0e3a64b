r"""Compare answer files with a first one question by question: equal, or where they first differ.

Lossless decoding means the same tokens, so this check stands behind every speed-up.
`answers/differences.py` says how answers are compared.

In half precision two almost equal logits may change places. With `--model-path` the model is loaded
and every first differing token is judged a tie or a BUG (`checking/tie_or_bug.py`); ties alone are no error.
A server's answers are judged likewise by the model that it serves (`checking/rerun.py`), or with `--judge-url`
by a server's log-probabilities (`checking/logprobs.py`).

Run:
    python -m evaluation.equal --file-path data/demo/model_answer \
        --jsonfile1 vanilla.jsonl --jsonfile2 recycling.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from evaluation.answers.answer_file import read_answers
from evaluation.answers.differences import (
    Comparison,
    Difference,
    compare_answers,
    verdict_path,
    write_verdict,
)
from evaluation.answers.record import RunRecord
from evaluation.answers.row import AnswerRow
from evaluation.inference.client import EndpointConfig
from evaluation.reporting.tables import json_line
from model.commands.command_line import OptionParser, UserError, add_options, config_of, run_command
from model.commands.model_options import ModelOptions
from model.options import DTYPES

if TYPE_CHECKING:  # torch is imported where a difference is judged
    from evaluation.checking.rerun import FileJudge

# Options of the model that judges; its dtype is that of the answers.
JUDGING = ("device", "trust_remote_code", "allow_pickle")
# In the names of a sidecar's kernels: drafts have the bits of plain decoding, so that nothing excuses a difference.
SAME_BITS = "same bits"
# Options of the server that judges.
SERVER = ("served_model", "api_key_env", "timeout")

EXAMPLES = """\
examples:
  python -m evaluation.equal --file-path data/demo/model_answer \\
      --jsonfile1 vanilla.jsonl --jsonfile2 recycling.jsonl
  python -m evaluation.equal --jsonfile1 run_1/vanilla.jsonl --jsonfile2 run_2/pld.jsonl
  python -m evaluation.equal --file-path data/demo/model_answer --model-path data/demo/model \\
      --jsonfile1 vanilla-bfloat16.jsonl --jsonfile2 recycling-bfloat16.jsonl hybrid-bfloat16.jsonl

  python -m evaluation.equal --jsonfile1 answers/vanilla.jsonl --jsonfile2 answers/served.jsonl \\
      --model-path ORG/NAME --served-dtype bfloat16
  python -m evaluation.equal --jsonfile1 answers/one.jsonl --jsonfile2 answers/other.jsonl \\
      --judge-url http://127.0.0.1:8000

exit code: 0 equal (or only ties, if they are judged), 1 different, 2 not comparable (such as a question
that failed in both files, when no other differs)
"""


class Result(NamedTuple):
    """The result of comparing a file with the first one."""

    report: dict[str, Any]  # of the line of JSON
    text: str
    exit_code: int


def main(argv: Sequence[str] | None = None) -> int:
    """Print the verdicts and one line of JSON; return the exit code."""
    options = _parse(argv)
    first, *others = (
        _locate(options.file_path, name) for name in (options.jsonfile1, *options.jsonfile2)
    )
    rows = read_answers(first)
    results = [_compared(first, other, rows, options) for other in others]
    if len(results) == 1:
        (result,) = results
        print(f"{result.text}\n{json_line(result.report)}")
        return result.exit_code
    for other, result in zip(others, results, strict=True):
        if not result.report["equal"]:
            print(f"{other}:\n{result.text}")
    equal = [result.report for result in results if result.report["equal"]]
    if equal:
        num_turns = sum(report["turns"] for report in equal)
        print(f"Equal to {first.name}: {len(equal)} of {len(results)} files, {num_turns} turns")
    reports = [result.report for result in results]
    print(json_line({"equal": len(equal) == len(results), "files": reports}))
    codes = {result.exit_code for result in results}
    return 1 if 1 in codes else max(codes)


def _compared(
    path: Path, other: Path, rows: list[AnswerRow], options: argparse.Namespace
) -> Result:
    other_rows = read_answers(other)
    comparison = compare_answers(rows, other_rows)
    lines = [_verdict(comparison, (str(path), str(other)))]
    differences = comparison.differences
    judged: dict[str, Any] = {}
    is_harmless = not differences
    have_same_bits = all(
        SAME_BITS in str((RunRecord.read(one).values.get("kernel_names") or {}).get("passes"))
        for one in (path, other)
    )
    if have_same_bits:
        lines.append(f"Both have passes with the {SAME_BITS} for every node: a difference is a bug")
    if (options.model_path or options.judge_url) and differences:
        from evaluation.checking.rerun import judge, judged_text  # imported late: torch

        judging = _file_judge((path, other), (rows, other_rows), options)
        judged = judge(judging, differences, comparison.num_questions)
        lines.append(judged_text(judged))
        num_ties = 0 if have_same_bits else judged["ties"]
        if options.keep_verdict:
            write_verdict(other, path, num_ties, len(differences) - num_ties)
            lines.append(f"kept in {verdict_path(other)}, which speed and leaderboard read")
        is_harmless = num_ties == len(differences)
    failures = comparison.failures
    report = {
        "equal": None if failures and not differences else not differences,
        "jsonfile1": str(path),
        "jsonfile2": str(other),
        "questions": comparison.num_questions,
        "turns": comparison.num_turns,
        "turns_by_token_ids": comparison.num_turns_by_ids,
        "turns_by_text": comparison.num_turns_by_text,
        "differing_questions": len(differences),
        "differing_question_ids": [difference.question_id for difference in differences],
        "first_difference": asdict(differences[0]) if differences else None,
        "failed_in_both": [failure.question_id for failure in failures],
        "judged": judged,
    }
    code = (2 if failures else 0) if is_harmless else 1
    return Result(report, "\n".join(lines), code)


def _file_judge(
    paths: tuple[Path, Path],
    rows: tuple[list[AnswerRow], list[AnswerRow]],
    options: argparse.Namespace,
) -> FileJudge:
    """Return what judges two files: a server, the model that a server serves, or the one that answered."""
    if options.judge_url:
        from evaluation.checking.logprobs import LogprobReplay

        config = config_of(EndpointConfig, {**vars(options), "base_url": options.judge_url})
        return LogprobReplay(paths, rows, config, options.question_file)
    is_served = any(RunRecord.read(path).is_served for path in paths)
    dtype = options.served_dtype
    if is_served != (dtype is not None):
        advice = "a server's precision is not known; give it" if is_served else "leave it out"
        raise UserError(
            f"served_dtype: got {dtype or 'none'} with {'a server' if is_served else 'no server'} among the files; "
            f"{advice}"
        )
    if is_served:
        from evaluation.checking.rerun import ServedReplay

        model = config_of(ModelOptions, {**vars(options), "dtype": dtype})
        return ServedReplay(paths, rows, model, options.question_file)
    from evaluation.checking.rerun import Replay

    return Replay(paths, rows, config_of(ModelOptions, vars(options)), options.question_file)


def _verdict(comparison: Comparison, names: tuple[str, str]) -> str:
    failed = []
    if comparison.failures:
        failure = comparison.failures[0]
        failed.append(
            f"{len(comparison.failures)} of {comparison.num_questions} questions failed in both files, which have "
            f"no answers there to compare; the first: {_place(failure)}: {failure.cause}"
        )
    if not comparison.differences:
        equal = (
            f"Equal: {comparison.num_questions - len(comparison.failures)} questions, {comparison.num_turns} turns "
            f"({comparison.num_turns_by_ids} by token ids, {comparison.num_turns_by_text} by text)"
        )
        lines = [f"Not comparable: {line}" for line in failed]
        return "\n".join([*lines, *([equal] if comparison.num_turns or not lines else [])])
    first = comparison.differences[0]
    lines = [
        f"Not equal: {len(comparison.differences)} of {comparison.num_questions} questions differ",
        *failed,
        f"First difference: {_place(first)}: {first.cause}",
    ]
    for label, excerpts in ((first.unit, first.excerpts), ("text", first.texts)):
        for name, excerpt in zip(names, excerpts or (), strict=False):
            lines.append(f"  {label} in {name}: {excerpt}")
    return "\n".join(lines)


def _place(difference: Difference) -> str:
    """Return where a difference is, in words."""
    found = {"choice": difference.choice, "turn": difference.turn}
    places = [f"{name} {index}" for name, index in found.items() if index is not None]
    if difference.unit is not None:
        places.append(f"{difference.unit} {difference.position}")
    question = f"question {difference.question_id} ({difference.category})"
    return ", ".join([question, *places]) + (" (counted from 0)" if places else "")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(
        prog="python -m evaluation.equal",
        description="Say whether answer files have the same answers as a first file, and where they "
        "first differ.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--file-path", metavar="DIR", help="folder of the files (default: here)")
    parser.add_argument("--jsonfile1", required=True, metavar="FILE", help="name in DIR, or a path")
    parser.add_argument(
        "--jsonfile2",
        required=True,
        nargs="+",
        metavar="FILE",
        help="the same; each of several is compared with the first file",
    )
    parser.add_argument(
        "--model-path",
        metavar="MODEL",
        help="load this model, the one that answered, and judge every difference: tie or BUG",
    )
    parser.add_argument(
        "--served-dtype",
        choices=[name for name in DTYPES if name != "auto"],
        help="with --model-path: the precision of the servers that answered",
    )
    parser.add_argument(
        "--judge-url",
        metavar="URL",
        help="judge every difference by log-probabilities from this server, one of those that "
        "answered",
    )
    add_options(parser, EndpointConfig, SERVER)
    parser.add_argument(
        "--question-file",
        metavar="FILE",
        help="the questions that were answered (default: those of the sidecar's benchmark)",
    )
    parser.add_argument(
        "--keep-verdict",
        action="store_true",
        default=None,
        help="with --model-path or --judge-url: keep the verdict beside the second file, for speed and leaderboard",
    )
    add_options(parser, ModelOptions, JUDGING)
    options = parser.parse_args(argv)
    judges = [name for name in ("model_path", "judge_url") if getattr(options, name) is not None]
    if len(judges) > 1:
        raise UserError("model_path, judge_url: got both; leave one of them out")
    needed = {
        **dict.fromkeys(("served_dtype", *JUDGING), ("model_path",)),
        **dict.fromkeys(SERVER, ("judge_url",)),
        **dict.fromkeys(("question_file", "keep_verdict"), ("model_path", "judge_url")),
    }
    for name, of_judges in needed.items():
        if getattr(options, name, None) is not None and set(of_judges).isdisjoint(judges):
            flag = of_judges[0].replace("_", "-")
            raise UserError(f"{name}: got it without --{flag}; leave it out, or give both")
    if options.file_path is not None and not Path(options.file_path).is_dir():
        raise UserError(f"file_path: got {options.file_path}; allowed: an existing folder")
    return options


def _locate(folder: str | None, name: str) -> Path:
    path = Path(folder or ".") / name
    if not path.exists() or path.is_dir():  # a pipe is read once
        raise UserError(f"no answer file {path}; give the .jsonl of an inference command")
    return path


if __name__ == "__main__":
    run_command(main)
