"""Show on a model and a machine whether a row of a pass has the same bits beside 1, 2, 8 and 32 others.

This library's kernels give a row the same bits. Where a model or a processor has none, it computes as
transformers does; the command names them. With the same bits a text has the same tokens with drafts and without,
in half precision too: nothing rounds another way because tokens were drafted, or because texts share a pass.

Run:
    python -m evaluation.check_rows --model-path data/demo/model --dtype bfloat16
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from evaluation.questions.questions import load_questions, question_file_of
from evaluation.reporting.tables import json_line, markdown_table
from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.model_options import ModelOptions
from model.commands.options import add_options, config_of

MODEL = ("model_path", "dtype", "device", "threads", "trust_remote_code", "allow_pickle")
COUNTS = (1, 2, 8, 32)
# The text has this many tokens more than rows that are compared.
CONTEXT = 64
EXAMPLES = """\
examples:
  python -m evaluation.check_rows --dtype bfloat16
  python -m evaluation.check_rows --model-path ORG/NAME --dtype float16 --device cuda --beside 1 4 16 64

exit code: 0 if this library's rows always have the same bits, else 1; transformers' are shown beside them
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and one line of JSON; return 1 if a row of this library's passes has other bits."""
    options = _parse(argv)
    model = config_of(ModelOptions, vars(options))
    # Imported late: torch.
    from evaluation.checking.row_bits import STOCK, row_bits
    from model.commands.loading import check_model, load_target

    checked = check_model(model)
    texts = (turn for one in load_questions(question_file_of("demo")) for turn in one.turns)
    num_tokens = options.positions + CONTEXT
    # A token has 16 characters at most here: a whole file would be longer than the tokenizer likes.
    token_ids: list[int] = checked.tokenizer("\n".join(texts)[: 16 * num_tokens]).input_ids
    token_ids = token_ids[:num_tokens]
    target = load_target(model, checked)
    found = row_bits(target, token_ids, options.beside, options.positions)
    header = ["Pass by", "Rows beside", "Same bits", "Largest difference of a logit"]
    rows = [
        [
            one.arithmetic,
            str(one.num_beside),
            f"{one.num_equal} of {one.num_rows}",
            f"{one.largest_difference:.3g}",
        ]
        for one in found
    ]
    dtype = str(target.dtype).removeprefix("torch.")
    kernels = ", ".join(f"{part} {name}" for part, name in target.kernel_names.items())
    print(f"{model.model_path}, {dtype}, {target.device}: a row alone and beside others")
    print(f"Kernels: {kernels}\n")
    print(markdown_table(header, rows))
    is_stable = all(one.is_stable for one in found if one.arithmetic != STOCK)
    print(
        json_line(
            {
                "is_stable": is_stable,
                "kernels": target.kernel_names,
                "rows": [one._asdict() for one in found],
            }
        )
    )
    return 0 if is_stable else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(
        prog="python -m evaluation.check_rows",
        description="Check whether a row of a pass has the same bits whatever other rows are in the "
        "pass.",
        epilog=EXAMPLES,
    )
    add_options(parser, ModelOptions, MODEL)
    parser.add_argument(
        "--beside",
        nargs="+",
        type=int,
        default=COUNTS,
        metavar="N",
        help=f"numbers of other rows in the pass (default: {' '.join(map(str, COUNTS))})",
    )
    parser.add_argument(
        "--positions", type=int, default=16, metavar="N", help="rows compared (default: 16)"
    )
    options = parser.parse_args(argv)
    if min(options.beside) < 1:
        raise UserError(f"beside: got {min(options.beside)}; allowed: 1 or more")
    if options.positions < 1:
        raise UserError(f"positions: got {options.positions}; allowed: 1 or more")
    return options


if __name__ == "__main__":
    run_command(main)
