"""Show the acceptance in an answer file, or in another bench's files, under its right name; write other formats.

Read: answer files, speculation_profile.json, a run folder of specdec_bench, a folder of speculators' CSV files, and
vLLM's per-request metrics. The first and the last tell single steps, and so can be written as any of the others.
docs/acceptance.md says which acceptance length is which.

Run:
    python -m evaluation.convert answers.jsonl --to specdec-bench --out run
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from evaluation.answers.answer_file import read_lines
from evaluation.answers.record import RunRecord
from evaluation.answers.row import AnswerRow
from evaluation.formats import profile, specdec_bench, speculators, vllm_requests
from evaluation.formats.steps import (
    AcceptanceSums,
    TurnSteps,
    acceptance_sums,
    by_category,
    turn_steps,
)
from evaluation.questions.questions import Question, load_questions, question_file_of
from evaluation.reporting.acceptance_tables import meanings_table, step_tables
from evaluation.reporting.options import make_folder
from evaluation.reporting.tables import Table, json_line
from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.files import parse_json, write_whole

PROFILE, SPECDEC_BENCH = "speculation-profile", "specdec-bench"
SPECULATORS, VLLM = "speculators", "vllm"
FORMATS = (PROFILE, SPECDEC_BENCH, SPECULATORS, VLLM)
EXAMPLES = """\
examples:
  python -m evaluation.convert data/demo/model_answer/model-hybrid-float32-temp-0.0.jsonl
  python -m evaluation.convert answers.jsonl --to speculation-profile --out speculation_profile.json
  python -m evaluation.convert answers.jsonl --to speculators --out results
  python -m evaluation.convert specdec_bench_run_folder
"""


class Source(NamedTuple):
    """What was read.

    Attributes:
        sums: counts by category, those of all under "".
        turns: the steps; None where the format has none.
        rows: of an answer file.
    """

    sums: dict[str, AcceptanceSums]
    turns: list[TurnSteps] | None = None
    rows: Sequence[AnswerRow] = ()


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and one line of JSON, and write what is asked for."""
    options = _parse(argv)
    path = Path(options.source)
    source = _read(path)
    if options.to:
        _write(options.to, path, source, Path(options.out), options.question_file)
    tables = [meanings_table(source.sums, f"Acceptance in {path}", "Category")]
    tables += step_tables(source.turns) if source.turns else []
    print("\n\n".join(_text(table, place) for place, table in enumerate(tables)))
    figures = {
        name or "all": {
            "tokens_per_step": sums.per_step,
            "tokens_per_drafted_step": sums.per_drafted_step,
            "mean_of_requests": sums.per_request,
        }
        for name, sums in source.sums.items()
    }
    tables_json = {table.caption: table.records for table in tables[1:]}
    print(json_line({"source": str(path), "acceptance": figures, **tables_json}))
    return 0


def _text(table: Table, place: int) -> str:
    notes = "\n".join(f"- {note}" for note in table.notes)
    return f"{table.caption}\n\n{table.markdown}" + (f"\n\n{notes}" if not place else "")


def _read(path: Path) -> Source:
    """Read a file or folder, whose format its content shows."""
    if path.is_dir():
        if (path / specdec_bench.ACCEPTANCE).is_file():
            return Source(specdec_bench.read_run(path))
        if (path / speculators.ACCEPTANCE).is_file():
            return Source(speculators.read_folder(path))
        raise UserError(
            f"{path}: has neither {specdec_bench.ACCEPTANCE} nor {speculators.ACCEPTANCE}; allowed: a run "
            "folder of specdec_bench, or one of speculators"
        )
    if path.suffix == ".json":
        return Source(profile.read_profile(path))
    rows: list[AnswerRow] = []
    if _is_of_vllm(path):
        turns = vllm_requests.read_requests(path)
    else:
        rows = [row for _, row in read_lines(path)]
        turns = turn_steps(rows)
    if not turns:
        raise UserError(
            f"{path}: has no record of steps (accept_lengths, or a server's speculative_decoding)"
        )
    sums = {"": acceptance_sums(turns)}
    sums |= {name: acceptance_sums(part) for name, part in by_category(turns).items()}
    return Source(sums, turns, rows)


def _is_of_vllm(path: Path) -> bool:
    with suppress(OSError, UnicodeDecodeError, UserError), path.open(encoding="utf-8") as file:
        return vllm_requests.is_request(parse_json(file.readline(), str(path)))
    return False


def _write(form: str, path: Path, source: Source, out: Path, question_file: str | None) -> None:
    if source.turns is None:
        raise UserError(
            f"to: got {form} for {path}, which does not record single steps; allowed: answer files and vLLM's "
            "per-request metrics"
        )
    record = RunRecord.read(path) if source.rows else RunRecord()
    if form in (PROFILE, SPECDEC_BENCH) and not source.sums[""].lengths:
        raise UserError(
            f"to: got {form} for {path}, which leaves out steps without a draft; allowed: {SPECULATORS}, {VLLM}"
        )
    if form in (SPECDEC_BENCH, SPECULATORS):
        make_folder(out)
    if form == PROFILE:
        write_whole(out, profile.profile_text(profile.profile_of(source.turns, record)))
    elif form == SPECDEC_BENCH:
        questions = _questions(record, question_file)
        specdec_bench.write_run(out, source.rows, source.turns, record, questions)
    elif form == SPECULATORS:
        speculators.write_folder(out, source.rows, source.turns)
    else:
        write_whole(out, vllm_requests.requests_text(source.turns))


def _questions(record: RunRecord, question_file: str | None) -> dict[int | str, Question]:
    """Return the questions by id; none if nobody gave them and the benchmark's are not here."""
    with suppress(UserError):
        file = question_file_of(record.bench_name or "", question_file)
        return {question.question_id: question for question in load_questions(file)}
    if question_file:
        load_questions(Path(question_file))  # says what is wrong
    return {}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(
        prog="python -m evaluation.convert",
        description="Show all kinds of acceptance lengths, and write them in other benchmarks' "
        "formats.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="an answer file, speculation_profile.json, a folder of specdec_bench or speculators, or vLLM's "
        "per-request metrics as JSON lines",
    )
    parser.add_argument("--to", choices=FORMATS, help="write this format too")
    parser.add_argument("--out", metavar="PATH", help="with --to: the file or folder to write")
    parser.add_argument(
        "--question-file",
        metavar="FILE",
        help=f"with --to {SPECDEC_BENCH}: the questions that were answered (default: the benchmark's)",
    )
    options = parser.parse_args(argv)
    if (options.to is None) != (options.out is None):
        raise UserError("to, out: got only one of them; give both, or neither")
    if options.question_file and options.to != SPECDEC_BENCH:
        raise UserError(f"question_file: got it without --to {SPECDEC_BENCH}; leave it out")
    return options


if __name__ == "__main__":
    run_command(main)
