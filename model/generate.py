"""Continues a text as it is given: the model's words on standard output, figures on standard error.

A message to a chat model is answered by the chat, which writes the model's chat template around it.

Run:
    python -m model.generate --prompt "The sea is"
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from .commands.command_line import (
    OptionParser,
    add_options,
    check_text,
    command_of,
    config_of,
    parse_with_method,
    printable,
    run_command,
    user_errors,
)
from .commands.model_options import FOR_A_TEXT, ModelOptions, SamplingOptions

COMMAND = command_of("generate")
EXAMPLES = f"""\
examples:
  # a text of a folder's, a GGUF file's or a hub's model; the text alone on stdout
  {COMMAND} --model-path MODEL --prompt "The sea is" --max-new-tokens 60 > text.txt

  # by a method with an option of its own, drawn instead of greedy
  {COMMAND} --model-path MODEL --prompt "The sea is" --method pld --num-pred-tokens 8 --temperature 0.7 --seed 1
"""


def run(argv: Sequence[str] | None = None) -> int:
    """Continue one text; return the exit code, or raise UserError for what cannot be used."""
    parser = OptionParser(
        prog=COMMAND,
        description="Continue a text as it is given. A message to a chat model: "
        f"{command_of('chat')} --prompt.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--prompt", metavar="TEXT", required=True, help="the text to continue")
    add_options(parser, ModelOptions, ("model_path", *FOR_A_TEXT))
    add_options(parser, SamplingOptions)
    given, method, of_method = parse_with_method(parser, argv)
    check_text(given["prompt"], "prompt")
    model, sampling = config_of(ModelOptions, given), config_of(SamplingOptions, given)
    # Here, since transformers takes seconds to import.
    from .commands.loading import check_model, check_prompt, load_decoder

    checked = check_model(model)
    check_prompt(checked, len(checked.tokenizer(given["prompt"]).input_ids))
    decoder = load_decoder(model, checked, method, of_method)
    with user_errors():
        output = decoder.generate(given["prompt"], **asdict(sampling))
    print(printable(output.text))
    print(f"[{decoder.method}: {output.summary()}]", file=sys.stderr)
    return 0


if __name__ == "__main__":
    run_command(run)
