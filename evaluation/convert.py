"""Show the acceptance in an answer file under its right names, and write it in other benches' formats.

docs/acceptance.md says which acceptance length is which.

Run:
    python -m evaluation.convert answers.jsonl --to specdec-bench --out run
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from evaluation.answers.answer_file import read_lines
from evaluation.answers.record import RunRecord
from evaluation.answers.row import AnswerRow
from evaluation.formats.other_benches import profile_of, requests_text, write_run
from evaluation.formats.steps import (
    AcceptanceSums,
    TurnSteps,
    acceptance_sums,
    by_category,
    by_position,
    by_start_length,
    by_turn,
    turn_steps,
)
from evaluation.questions.questions import Question, load_questions, question_file_of
from evaluation.reporting.options import make_folder
from evaluation.reporting.tables import Cell, Table, figure_cell, json_line
from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.files import write_whole

PROFILE, SPECDEC_BENCH, VLLM = "speculation-profile", "specdec-bench", "vllm"
FORMATS = (PROFILE, SPECDEC_BENCH, VLLM)
MEANINGS = {
    "Tokens a step": "every step counted: MAT of Spec-Bench and of this project, specdec_bench's "
    "mean_accept_length",
    "Tokens a drafted step": "1 + accepted / drafts, steps without a draft left out: vLLM, AIPerf, speculators",
    "Mean of requests": "each request's tokens a step, averaged over requests: specdec_bench's Average_AL",
}

EXAMPLES = """\
examples:
  python -m evaluation.convert data/demo/model_answer/model-hybrid-float32-temp-0.0.jsonl
  python -m evaluation.convert answers.jsonl --to speculation-profile --out speculation_profile.json
  python -m evaluation.convert answers.jsonl --to specdec-bench --out run
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and one line of JSON, and write what is asked for."""
    options = _parse(argv)
    path = Path(options.source)
    rows = [row for _, row in read_lines(path)]
    turns = turn_steps(rows)
    if not turns:
        raise UserError(
            f"{path}: has no record of steps (accept_lengths, or a server's speculative_decoding)"
        )
    if options.to:
        _write(options.to, path, rows, turns, Path(options.out), options.question_file)
    sums = _sums({"": turns} | by_category(turns))
    tables = [_meanings_table(sums, f"Acceptance in {path}", "Category"), *_step_tables(turns)]
    print("\n\n".join(_text(table, place) for place, table in enumerate(tables)))
    figures = {
        name or "all": {
            "tokens_per_step": it.per_step,
            "tokens_per_drafted_step": it.per_drafted_step,
            "mean_of_requests": it.per_request,
        }
        for name, it in sums.items()
    }
    tables_json = {table.caption: table.records for table in tables[1:]}
    print(json_line({"source": str(path), "acceptance": figures, **tables_json}))
    return 0


def _sums(parts: Mapping[str, Sequence[TurnSteps]]) -> dict[str, AcceptanceSums]:
    return {name: acceptance_sums(part) for name, part in parts.items()}


def _meanings_table(sums: Mapping[str, AcceptanceSums], caption: str, first: str) -> Table:
    """Return a line for each name's counts, such as a category's; what the answers do not tell is `-`."""
    header = [first, *MEANINGS, "Steps", "Drafted steps", "Drafted tokens", "Accepted %"]
    rows = [
        [
            Cell(name or "all"),
            figure_cell(it.per_step),
            figure_cell(it.per_drafted_step),
            figure_cell(it.per_request),
            *(_count(value) for value in (it.num_steps, it.drafts, it.draft_tokens)),
            figure_cell(100 * it.accepted / it.draft_tokens if it.draft_tokens else float("nan")),
        ]
        for name, it in sums.items()
    ]
    notes = [f"{name}: {words}" for name, words in MEANINGS.items()]
    return Table(caption, header, rows, notes=notes)


def _step_tables(turns: Sequence[TurnSteps]) -> list[Table]:
    """Return acceptance by turn, by the prompt's length, and by the tokens before a step."""
    bins = {
        ("Acceptance by turn of the conversation", "Turn"): by_turn(turns),
        ("Acceptance by tokens of the prompt", "Prompt"): by_start_length(turns),
        ("Acceptance by tokens before the step", "Before"): by_position(turns),
    }
    return [
        _meanings_table(_sums(found), caption, first)
        for (caption, first), found in bins.items()
        if found
    ]


def _count(value: float) -> Cell:
    return Cell("-" if value != value else f"{value:.0f}", value)


def _text(table: Table, place: int) -> str:
    notes = "\n".join(f"- {note}" for note in table.notes)
    return f"{table.caption}\n\n{table.markdown}" + (f"\n\n{notes}" if not place else "")


def _write(
    form: str,
    path: Path,
    rows: Sequence[AnswerRow],
    turns: Sequence[TurnSteps],
    out: Path,
    question_file: str | None,
) -> None:
    record = RunRecord.read(path)
    if form == PROFILE:
        write_whole(out, json.dumps(profile_of(turns, record), indent=2) + "\n")
    elif form == SPECDEC_BENCH:
        make_folder(out)
        write_run(out, rows, turns, record, _questions(record, question_file))
    else:
        write_whole(out, requests_text(turns))


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
    parser.add_argument("source", metavar="SOURCE", help="an answer file")
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
