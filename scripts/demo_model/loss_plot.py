r"""Draw the demo model's loss from its committed log.

Reads ``train_log.jsonl`` (written by ``scripts.demo_model``) and writes a PNG: training and held-out
loss over tokens, and the loops of the last phase over its rounds.

Example:
    python -m scripts.demo_model.loss_plot --log data/demo/model/train_log.jsonl \
        --out docs/img/demo-model-loss.png
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model.commands.command_line import OptionParser, UserError, run_command, user_errors
from model.commands.files import check_output, replace_file

BLUE, ORANGE, GREY = "#1f5fa8", "#d9761a", "#777777"


def read_log(path: Path) -> list[dict[str, float]]:
    """Read the log.

    Raises:
        ValueError: The file has no line of the main phase.
    """
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not any("tokens" in entry for entry in entries):
        raise ValueError(
            f"log: got {path} without a training step, allowed a train_log.jsonl; "
            "do train with scripts.demo_model"
        )
    return entries


def draw_losses(axis: Any, entries: list[dict[str, float]]) -> None:
    """Training and held-out loss over millions of tokens."""
    steps = [entry for entry in entries if "tokens" in entry]
    held_out = [entry for entry in steps if "held_out_response" in entry]
    for key, color, name in (("all_tokens", GREY, "all tokens"), ("response", BLUE, "answers")):
        axis.plot(
            [entry["tokens"] / 1e6 for entry in steps],
            [entry[key] for entry in steps],
            color=color,
            alpha=0.55,
            linewidth=1.0,
            label=f"{name}, training",
        )
        axis.plot(
            [entry["tokens"] / 1e6 for entry in held_out],
            [entry[f"held_out_{key}"] for entry in held_out],
            color=color,
            marker="o",
            markersize=4,
            label=f"{name}, held out",
        )
    axis.set(xlabel="training tokens (millions)", ylabel="loss (nats per token)", ylim=(1.25, 6))
    axis.legend(frameon=False)


def draw_loops(axis: Any, entries: list[dict[str, float]]) -> None:
    """Share of looping and ended answers to training prompts over the rounds."""
    rounds = [entry for entry in entries if "round" in entry]
    for key, color, name in (("looped", ORANGE, "loop"), ("ended", BLUE, "end by themselves")):
        axis.plot(
            [entry["round"] for entry in rounds],
            [100 * entry[key] for entry in rounds],
            color=color,
            marker="o",
            markersize=4,
            label=f"answers that {name}",
        )
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(xlabel="round against loops", ylabel="share of answers (%)", ylim=(0, 100))
    axis.legend(frameon=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = OptionParser(prog="python -m scripts.demo_model.loss_plot", description=__doc__)
    parser.add_argument("--log", type=Path, required=True, help="train_log.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="PNG file to write")
    options = parser.parse_args(argv)
    check_output(options.out, "out")
    if options.out.suffix != ".png":
        raise UserError(f"out: got {options.out}; allowed: a .png file")
    with user_errors(OSError):
        entries = read_log(options.log)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    draw_losses(left, entries)
    draw_loops(right, entries)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    replace_file(options.out, lambda file: figure.savefig(file, dpi=110, format="png"))
    return 0


if __name__ == "__main__":
    run_command(main)
