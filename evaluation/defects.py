"""List the defects in the rows of answer files.

`answers/defects.py` says what counts as a defect, and its effect on figures.

Run:
    python -m evaluation.defects data/spec_bench/model_answer/vicuna-7b-v1.3-recycling.jsonl
"""

from __future__ import annotations

from collections.abc import Sequence

from evaluation.answers.answer_file import Categories, add_category_options, read_lines
from evaluation.answers.defects import check_limit, find_defects, find_missing
from evaluation.reporting.tables import json_line
from model.commands.command_line import OptionParser, run_command

EXAMPLES = """\
examples:
  python -m evaluation.defects recycling.jsonl vanilla.jsonl
  python -m evaluation.defects foreign.jsonl --max-new-tokens 1024

exit code: 0 no defect, 1 some, 2 not an answer file
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each defect and one line of JSON; return 1 if there is any."""
    parser = OptionParser(
        prog="python -m evaluation.defects",
        description="List the defects in the rows of answer files, and rows that are missing in one "
        "of several files.",
        epilog=EXAMPLES,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="answer files")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="maximum of new tokens in a turn (default: the sidecar's)",
    )
    add_category_options(parser)
    options = parser.parse_args(argv)
    check_limit(options.max_new_tokens)
    # Each file once: a pipe cannot be read again.
    categories = Categories(options.question_file, options.category_map)
    files = {
        path: [(number, categories.of(row)) for number, row in read_lines(path)]
        for path in dict.fromkeys(options.files)
    }
    limit = options.max_new_tokens
    defects = [it for path, lines in files.items() for it in find_defects(path, lines, limit)]
    defects += find_missing(files)
    for defect in defects:
        print(defect)
    print(f"{len(defects)} defects" if defects else "no defect")
    counts = {path: sum(it.path == path for it in defects) for path in files}
    print(json_line({"defects": len(defects), "files": counts}))
    return 1 if defects else 0


if __name__ == "__main__":
    run_command(main)
