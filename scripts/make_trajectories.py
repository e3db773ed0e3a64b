"""Make trajectories of an agent that looks files up: OpenAI's messages, the same at every run of one seed.

They are made, not recorded, and say so (category "made trajectory"): files, tasks and answers come from small
lists. What is real about them is their shape: a long system prompt, calls and results in turn, results that come
again in answers, and contexts that grow. Calls are texts, which every chat template keeps.

Run:
    python -m scripts.make_trajectories --out data/made_trajectories/question.jsonl
    python -m evaluation.compare --bench-name made_trajectories --methods vanilla pld hybrid --max-new-tokens 24
    python -m evaluation.convert data/made_trajectories/model_answer/ANSWERS.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.files import write_whole

CATEGORY = "made trajectory"
SYSTEM = """You mend a small program. In each message call one tool, as a line of JSON, or answer the user.
Tools: {"name": "list_files", "arguments": {"folder": TEXT}}, {"name": "read_file", "arguments": {"path": TEXT}},
{"name": "search", "arguments": {"word": TEXT}}, {"name": "run_tests", "arguments": {"path": TEXT}}."""
FOLDERS = ("parser", "server", "storage", "client", "report")
NOUNS = ("token", "row", "header", "budget", "cache", "session", "page", "index", "filter", "queue")
VERBS = ("read", "write", "check", "merge", "split", "count", "sort", "load", "close", "parse")
EXAMPLES = """\
examples:
  python -m scripts.make_trajectories --out data/made_trajectories/question.jsonl
"""


def trajectory(seed: int, num_turns: int) -> list[dict[str, str]]:
    """Return the messages of one trajectory, with this many of the assistant's."""
    draws = random.Random(seed)
    folder = draws.choice(FOLDERS)
    files = [f"{folder}/{verb}_{draws.choice(NOUNS)}.py" for verb in draws.sample(VERBS, 4)]
    messages = [{"role": "system", "content": SYSTEM}]
    turns = _turns(draws, folder, files)
    for _ in range(num_turns):
        asked, answered = next(turns)
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answered})
    return messages


def _turns(draws: random.Random, folder: str, files: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what the agent is told and what it says: a task after another, each in five messages."""
    while True:
        path, noun = draws.choice(files), draws.choice(NOUNS)
        name = Path(path).stem
        line = draws.randrange(2, 7)
        code = _code(draws, name, noun)
        yield (
            f"The test of {name} in {folder} fails when a {noun} is empty. Find out why, and mend it.",
            _call("list_files", folder=folder),
        )
        yield "Result of list_files:\n" + "\n".join(files), _call("read_file", path=path)
        yield f"Result of read_file, {path}:\n" + "\n".join(code), _call("search", word=noun)
        found = [f"{path}:{place + 1}: {text.strip()}" for place, text in enumerate(code)]
        hits = [text for text in found if noun in text]
        yield (
            "Result of search:\n" + "\n".join(hits),
            _call("run_tests", path=f"tests/test_{name}.py"),
        )
        yield (
            f"Result of run_tests:\nFAILED tests/test_{name}.py: line {line} of {path}: the {noun} is empty",
            f"Line {line} of {path} is wrong: {code[line - 1].strip()} It should return before it where the "
            f"{noun} is empty.",
        )


def _code(draws: random.Random, name: str, noun: str) -> list[str]:
    lines = [f"def {name}({noun}s, limit):", "    found = []", f"    for {noun} in {noun}s:"]
    for verb in draws.sample(VERBS, 4):
        lines.append(f"        {noun} = {verb}_{noun}({noun}, limit)")
    return [*lines, f"        found.append({noun})", "    return found"]


def _call(name: str, **arguments: str) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def main(argv: Sequence[str] | None = None) -> int:
    """Write the trajectories."""
    options = _parse(argv)
    rows = [
        {
            "id": f"made-{options.seed}-{place}",
            "category": CATEGORY,
            "messages": trajectory(1000 * options.seed + place, options.turns),
        }
        for place in range(options.trajectories)
    ]
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, "".join(json.dumps(row) + "\n" for row in rows))
    num_turns = options.trajectories * options.turns
    print(f"{options.trajectories} made trajectories of {num_turns} turns in {out}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(
        prog="python -m scripts.make_trajectories",
        description="Make trajectories of an agent, as questions.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="JSONL file to write")
    for name, default, text in (
        ("trajectories", 10, "trajectories"),
        ("turns", 12, "messages of the assistant in each"),
        ("seed", 0, "seed: the same trajectories at every run"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    options = parser.parse_args(argv)
    for name, least in (("trajectories", 1), ("turns", 1), ("seed", 0)):
        if getattr(options, name) < least:
            raise UserError(f"{name}: got {getattr(options, name)}; allowed: {least} or more")
    return options


if __name__ == "__main__":
    run_command(main)
