"""Download benchmark question files into `data/`: pinned, checked, never overwritten silently.

The repository carries its own demo questions only; all others stay with their authors.
This command fetches them at one fixed commit and compares the sha256 before anything is written, so
that two measurements named `spec_bench` were always taken on the same questions. `mt_bench` is
the first 80 rows of Spec-Bench. `humaneval`, `gsm8k` and `math500` are converted from the file
that their authors publish, whose hash is pinned too. Examples are in `_EXAMPLES`.
"""

from __future__ import annotations

import hashlib
import http.client
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from evaluation.questions.pinned_data import ELSEWHERE, PINNED, PinnedFile
from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.files import file_hash
from model.machine.files import atomic_write

DATA_DIR = Path(__file__).resolve().parents[1] / "data"
QUESTION_FILE = "question.jsonl"
TIMEOUT_SECONDS = 30.0

_EXAMPLES = """\
examples:
  python -m scripts.download_data spec_bench mbpp
  python -m scripts.download_data humaneval gsm8k math500
  python -m scripts.download_data mt_bench --from data   (cut from data/spec_bench, no network)
  python -m scripts.download_data mbpp --data-dir benchmarks
"""


class NetworkError(UserError):
    """The host could not be reached, or sent only a part of the file."""

    exit_code = 1


def place(
    bench: str, data_dir: Path = DATA_DIR, from_dir: Path | None = None, *, force: bool = False
) -> str:
    """Place one benchmark's question file and return a line that says what was done.

    Args:
        bench: a name in `PINNED`.
        data_dir: receives `<bench>/question.jsonl`.
        from_dir: has the published file in `<bench>/`, to read instead of the network.
        force: replace a file that has another hash.

    Raises:
        UserError: if a file with another hash is in the way, or the input is missing or wrong.
        NetworkError: if the download failed.
        OSError: if the target cannot be read or written.
    """
    pinned = PINNED[bench]
    target = data_dir / bench / QUESTION_FILE
    if target.exists():
        found = file_hash(target)
        if found == pinned.sha256:
            return f"{bench}: {target} is already there with the pinned sha256, left alone"
        if not force:
            raise UserError(
                f"{target} holds other content: got sha256 {found}; allowed: {pinned.sha256}; "
                "move it away, or pass --force to replace it"
            )
    content = _load_checked(PINNED[pinned.parent or bench], from_dir)
    if pinned.parent is not None:
        content = b"".join(content.splitlines(keepends=True)[: pinned.num_rows])
        _check(content, pinned, f"the first {pinned.num_rows} rows of {pinned.parent}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as temporary:
        temporary.write_bytes(content)
    return f"{bench}: {pinned.num_rows} questions written to {target} ({pinned.licence})"


def _load_checked(pinned: PinnedFile, from_dir: Path | None) -> bytes:
    origin = pinned.url
    if from_dir is None:
        print(f"fetching {pinned.name}: {origin}", file=sys.stderr)
        try:
            with urllib.request.urlopen(origin, timeout=TIMEOUT_SECONDS) as response:
                content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise NetworkError(
                f"could not fetch {origin}: got {error}; allowed: the whole file; try again, or "
                f"save it elsewhere as DIR/{pinned.name}/{pinned.published_name} and use --from DIR"
            ) from error
    else:
        path = from_dir / pinned.name / pinned.published_name
        if not path.is_file():
            raise UserError(
                f"no question file to copy: got {path}; allowed: DIR/{pinned.name}/{path.name} "
                "under --from DIR; name the folder that holds it, or leave --from out"
            )
        content, origin = path.read_bytes(), str(path)
    if pinned.convert is not None:
        _check(content, pinned, origin, pinned.published_sha256)
        content, origin = pinned.convert(content), f"what became of {origin}"
    _check(content, pinned, origin)
    return content


def _check(content: bytes, pinned: PinnedFile, origin: str, expected: str | None = None) -> None:
    found, expected = hashlib.sha256(content).hexdigest(), expected or pinned.sha256
    if found != expected:
        raise UserError(
            f"{origin} is not the pinned {pinned.name} file: got sha256 {found}; "
            f"allowed: {expected}; nothing was written, take the file from {pinned.url}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    pinned_lines = "\n".join(
        f"  {name:<11} {pinned.num_rows} questions, {pinned.source}, {pinned.licence}"
        for name, pinned in PINNED.items()
    )
    parser = OptionParser(
        prog="python -m scripts.download_data",
        description="Download benchmark questions, pinned by commit and sha256, into data/.",
        epilog=f"benchmarks:\n{pinned_lines}\n\n{_EXAMPLES}",
    )
    parser.add_argument("bench", nargs="*", help=f"one or more of: {', '.join(PINNED)}")
    parser.add_argument(
        "--from",
        dest="from_dir",
        metavar="DIR",
        type=Path,
        help="take the published file in DIR/<bench>/ (question.jsonl, HumanEval.jsonl.gz, test.jsonl) "
        "instead of using the network (mt_bench is cut from DIR/spec_bench)",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=DATA_DIR,
        help="folder that receives NAME/question.jsonl (default: data/ of the checkout)",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace a file that has another sha256"
    )
    args = parser.parse_args(argv)
    known = ", ".join(PINNED)
    for bench in args.bench or [""]:
        if bench in ELSEWHERE:
            raise UserError(
                f"cannot fetch this benchmark: got {bench}; allowed: {known}; it {ELSEWHERE[bench]}"
            )
        if bench not in PINNED:
            raise UserError(
                f"unknown benchmark: got {bench!r}; allowed: {known}; name one or more of them"
            )
    try:
        for bench in dict.fromkeys(args.bench):
            print(place(bench, args.data_dir, args.from_dir, force=args.force))
    except OSError as error:
        raise UserError(
            f"cannot read or write a file: got {error}; allowed: a readable --from and a writable "
            "--data-dir; check both paths"
        ) from error
    return 0


if __name__ == "__main__":
    run_command(main)
